"""Workers on the nodes of a Ray cluster: `launch_server --use-ray`."""
