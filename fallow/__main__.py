from fallow.cli import main

main()
