"""Pictures of runs. The same records always give the same bytes."""

from fedbat.plots.canvas import digest
from fedbat.plots.comparison import Curve, draw_comparison
from fedbat.plots.links import LinkCurve, LinkRow, draw_link
from fedbat.plots.panels import NEAR, Line, Panel, draw_panels
from fedbat.plots.rates import RatePanel, draw_rates
from fedbat.plots.spots import Spot, SpotPanel, draw_spots
from fedbat.plots.styles import RunStyle, method_colors, run_styles, zoom

__all__ = [
    "NEAR",
    "Curve",
    "Line",
    "LinkCurve",
    "LinkRow",
    "Panel",
    "RatePanel",
    "RunStyle",
    "Spot",
    "SpotPanel",
    "digest",
    "draw_comparison",
    "draw_link",
    "draw_panels",
    "draw_rates",
    "draw_spots",
    "method_colors",
    "run_styles",
    "zoom",
]
