"""Looking inside models: maps of any mixer, numbers of heads, interventions, one offline page."""
