"""The only code that sees all packages: settings, wiring, runs, reports."""
