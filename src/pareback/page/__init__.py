"""The page: what a store of runs holds as one HTML file that needs nothing else, and as figures for papers.

Charts are drawn by Vega-Lite. Its bundle comes from the package ``vl-convert-python`` of the extra ``page``: 0.9 MB, so
that the page stays small (Plotly's wheel holds only its full bundle of 4.8 MB); no code from elsewhere lies in this
repository; the same charts become PNG and SVG without a browser; and Vega can draw without ``eval``, so that the page's
policy lets no script run but the two that were written into it.
"""
