"""What threads and asynchronous work wait by: barriers, mbarriers, groups, warp groups."""
