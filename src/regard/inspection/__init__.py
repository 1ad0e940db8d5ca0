"""Looking inside models, `regard.look`: maps of any mixer, numbers of heads, interventions, a page.

The package is not called `look`, because that is the function: `regard.look(model, inputs)`.
"""

from regard.inspection.view import View, look

__all__ = ["View", "look"]
