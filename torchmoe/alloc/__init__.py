"""Planning without a GPU: specs, roofline, the allocator of DisagMoE, the planner of Piper, the platform profile.

Import from the modules: ``specs`` and ``models`` (what is planned), ``allocator``, ``search``, ``planner``, ``roofline``,
``simulated``, ``profile``, ``emit``. The solver (mip) and matplotlib are needed only where they are used.
"""
