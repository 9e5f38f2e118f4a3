// Package testbed runs the nodes of a cluster on one machine, so that tests can cut their
// network, freeze them, take their power and break their disks.
//
//	node         namespaces of its own and every process in them: what a machine is to
//	             the programs that run on it
//	switch       the network between the nodes: package ethernet
//	shared disk  a directory that nodes mount, with the caches of NFS: package netfs
//	host         this machine, outside of all nodes; the test's process runs there
//
// # Nodes
//
// A node has its own network interface, process IDs, mounts, host name and System V IPC.
// The files of the host are visible in it, with these exceptions:
//
//	/dev/shm        a tmpfs of the configured size
//	/run, /srv      empty; /srv is the place for mount points of disks
//	/tmp, $TMPDIR   the host's files, but the node's changes stay in the node
//	/proc           the node's processes, and its own boot ID
//	/etc/hosts      the names and addresses of all nodes
//
// pid 1 of a node is this program again, in [Main], which waits for orphans and does
// nothing else. Commands are children of the test's process that run in the node, so
// [Cmd] is an [os/exec.Cmd]. If the test's process ends in any way, so do its nodes.
//
// [Node.PowerOff] loses the node's frames before it kills its processes, so peers receive
// no FIN and no RST: silence, as from a machine without power. [Node.Freeze] stops the
// processes alone; the kernel still acknowledges what arrives. [Node.Processes] reads
// /proc of the host, so it shows what runs whatever the programs claim.
//
// # Disks
//
// A [Disk] in the Config of several nodes, with one [netfs.Server], is a shared disk.
// Directories of the host in Config.Binds, one for each node, are local disks: what a
// user has who copied data to each node.
//
// # What differs from real machines
//
// All nodes share one kernel: its page cache outside of disks, its clocks, its memory and
// its CPUs. A node cannot run out of memory alone, its clock cannot be wrong, and it has
// no devices of its own. Users and user IDs are the host's. A node's kernel never fails:
// it acknowledges and answers ARP while the node is frozen, and a frozen node's disk
// requests complete. A power off loses what a disk's client holds back, and never what
// was written to the host's filesystem. Rates and delays hold as far as the test's
// process gets CPU time; package ethernet moves about one GB/s at best. /sys shows the
// host, and nodes have no IPv6 and no other network.
//
// # Requirements
//
// Linux 5.8 or later, root, /dev/net/tun, /dev/fuse and overlayfs. cgroup v2 is used to
// freeze if it can be written.
package testbed
