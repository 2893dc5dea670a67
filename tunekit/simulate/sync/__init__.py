"""What threads and asynchronous work are ordered by: barriers, mbarriers, groups, warp groups, fences and flags."""
