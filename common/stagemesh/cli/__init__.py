"""The `stagemesh` command, a module a command. What a command needs is imported when it runs: --help stays quick."""
