"""diagnose: finds what silently loses updates in any optimizer. Only reads; steps and changes nothing."""
