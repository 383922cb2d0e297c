// Which of the instruction sets that a library was compiled for to use.
#pragma once

#include <cstdlib>
#include <string>

namespace pareback {

enum class Isa { portable, avx2, avx512 };

// The widest that this processor has; PAREBACK_ISA=avx2 or portable asks for a narrower one, for tests.
inline Isa widest_isa() {
#if defined(__x86_64__) && (defined(__GNUC__) || defined(__clang__))
  const char* asked = std::getenv("PAREBACK_ISA");
  const std::string isa = asked == nullptr ? "avx512" : asked;
  __builtin_cpu_init();
  if (isa == "avx512" && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return Isa::avx512;
  if (isa != "portable" && __builtin_cpu_supports("avx2")) return Isa::avx2;
#endif
  return Isa::portable;
}

}  // namespace pareback
