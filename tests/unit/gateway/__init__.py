"""The gateway's parts that need no server of delayd."""
