"""python -m regard.cli"""

from regard.__main__ import main

main()
