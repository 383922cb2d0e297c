// libFuzzer on the C++ reader of .pare positions, under sanitizers; outside CI, since it needs clang:
//
//   clang++ -std=c++17 -g -O1 -fsanitize=fuzzer,address,undefined -I src/pareback/kernels benchmarks/fuzz_gaps.cpp -o fuzz-gaps
//   ./fuzz-gaps -max_total_time=600 -max_len=256
//
// The bytes are the counts and the code. What Python checks before it calls is kept here too: planes and unary bytes are
// as long as they say. Nothing may be read or written beyond them, whatever they hold.

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "gaps.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t length) {
  if (length < 4) return 0;
  Gaps gaps;
  gaps.low_bits = data[0] % 9;  // MOST_LOW_BITS of artifact/positions.py is 8, and Python refuses more
  gaps.count = data[1];
  gaps.size = gaps.count + (static_cast<int64_t>(data[2]) << (data[3] % 24));
  gaps.plane = (gaps.count + 1 + 7) / 8;
  std::vector<uint8_t> rest(data + 4, data + length);
  const size_t planes = static_cast<size_t>(gaps.plane * gaps.low_bits);
  if (rest.size() < planes || gaps.size > (1 << 22)) return 0;
  const std::vector<uint8_t> low(rest.begin(), rest.begin() + static_cast<ptrdiff_t>(planes));
  const std::vector<uint8_t> unary(rest.begin() + static_cast<ptrdiff_t>(planes), rest.end());
  gaps.planes = low.data();
  gaps.unary = unary.data();
  gaps.unary_bytes = static_cast<int64_t>(unary.size());
  std::vector<uint16_t> values(static_cast<size_t>(gaps.count), 7), target(static_cast<size_t>(gaps.size), 0);
  const int32_t looked = each_position(gaps, [](int64_t, int64_t) {});
  const int32_t put = put_values<uint16_t>(gaps, values.data(), target.data());
  if (looked != put) abort();
  if (put == kSound && std::count(target.begin(), target.end(), 7) != gaps.count) abort();
  return 0;
}
