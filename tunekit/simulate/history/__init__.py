"""What happened before what: vector clocks, and each cell's last writer and readers."""
