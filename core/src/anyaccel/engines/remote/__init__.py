"""What any cluster needs: the pool's side of it, the hosts on its nodes, and what the two say to each other."""
