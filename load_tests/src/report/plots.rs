//! Curves as SVG.
