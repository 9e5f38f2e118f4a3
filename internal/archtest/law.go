// Package archtest checks the architecture of this repository: which room may import
// which, which room owns which engine, and how every package is documented. Its test
// fails with one [Finding] for each breach.
//
//	room     a directory with a law of its own; a directory below it without
//	         one belongs to it (internal/demo/digits to internal/demo)
//	core     a room that is pure: it touches no file, no network and no log
//	         output, and never reads the clock
//	engine   a foreign module that only the rooms named may import
//	law      all of these together, as data
//
// Only direct imports of non-test files are judged: a test may import an engine that
// its room must not. Directories named testdata or vendor, hidden directories and
// nested modules are not part of the tree. Files under the constraint "ignore" are not
// part of a package.
package archtest

// Law is the set of rules for a tree of packages.
type Law struct {
	Module   string // import path of the tree's root
	Rooms    []Room
	Engines  []Engine // the first whose prefix matches an import decides
	MaxFiles int      // of a directory, tests not counted
	MaxLines int      // of a file that is neither a test nor generated
	MinLines int      // of such a file, except where Short has a reason
	Short    []Short
	Public   int // exported functions, methods and types that other modules can import, at most; an alias counts once
}

// Short is a file that has fewer lines than usual, and the reason.
type Short struct{ Path, Reason string }

// Room is one directory with its rights. It may always import itself.
type Room struct {
	Path   string   // slash-separated, relative to the root
	Holds  string   // its duty, for the table in ARCHITECTURE.md
	May    []string // paths of the rooms that it may import; [Any] for all
	Core   bool     // see the package comment
	NoDeps bool     // of foreign code, only the standard library
	Closed bool     // no other room may import it, whatever its May grants
}

// Any in a room's May stands for every room that is not closed.
const Any = "*"

// Engine is a foreign module, or a part of one, with the rooms that own it.
type Engine struct {
	Prefix string // whole path elements of the import path
	Owners []string
}

// Repository returns the law of this repository.
func Repository() Law {
	return Law{
		Module: "github.com/ckptstore/ckptstore",
		Rooms: []Room{
			{Path: "internal/bytesize", Holds: "byte counts as text", NoDeps: true},
			{Path: "internal/problem", Holds: "the kinds of errors: one table to HTTP statuses and exit codes", Core: true, NoDeps: true},
			{Path: "internal/problem/system", Holds: "the kinds of the system's errors: full disks, deadlines, missing rights", NoDeps: true, May: []string{"internal/problem"}},
			{Path: "internal/httpkit", Holds: "the request kit: decode within a limit, reply, refuse with problem details, check tokens", NoDeps: true, May: []string{"internal/problem", "internal/problem/system"}},
			{Path: "internal/crc32c", Holds: "CRC-32C at the speed of memory"},
			{Path: "internal/backstop", Holds: "ends a program that is stuck after a request to end", NoDeps: true},
			{Path: "internal/container", Holds: "what a container expects of its programs: reaping orphans, leaving the cause of the end, annotating the pod"},
			{Path: "internal/redact", Holds: "removes secrets from command lines, configurations and messages", Core: true, NoDeps: true},
			{Path: "internal/terminal", Holds: "makes text of stores harmless for a terminal", Core: true, NoDeps: true},
			{Path: "internal/private", Holds: "files that only this user can open", NoDeps: true, May: []string{"internal/problem"}},
			{Path: "internal/attest", Holds: "statements about exported checkpoints: model signing, provenance, their signatures", NoDeps: true, May: []string{"internal/problem", "internal/private"}},
			{Path: "internal/share", Holds: "gives what is made in a directory of a group to the group"},
			{Path: "internal/beneath", Holds: "files below a directory, reached without following symbolic links", May: []string{"internal/problem", "internal/share"}},
			{Path: "internal/durable", Holds: "small files and names that survive a loss of power", NoDeps: true, May: []string{"internal/share", "internal/beneath"}},
			{Path: "internal/claim", Holds: "claims of a directory where locks may hold for one machine only; probes whether machines share one"},
			{Path: "internal/nodes", Holds: "the control plane of a job over several nodes: joining, beats, commands, messages, relayed requests", NoDeps: true, May: []string{"internal/problem", "internal/httpkit", "internal/private", "internal/share", "internal/beneath", "internal/durable", "internal/claim"}},
			{Path: "internal/disk", Holds: "filesystem requirements: sync a directory, refuse a pipe"},
			{Path: "tensor", Holds: "dtype, shape, box, shard", Core: true},
			{Path: "events", Holds: "event kinds, envelope, subjects, codec", Core: true, May: []string{"internal/problem"}},
			{Path: "projections", Holds: "folds and queries over ordered rows", Core: true, May: []string{"internal/problem", "events"}},
			{Path: "internal/checkpoint", Holds: "the parts of a checkpoint, in memory and in bytes: reference, digest, layout, manifest, index, receipt, local plan", Core: true, May: []string{"internal/crc32c", "tensor"}},
			{Path: "planner", Holds: "save and load plans, plan cache, the coordinator; `planner/retention` decides what a collection deletes", Core: true, May: []string{"internal/problem", "tensor", "events", "projections", "internal/checkpoint"}},
			{Path: "internal/tune", Holds: "a search over trials: its space, and its decisions as a fold of the log", Core: true, May: []string{"internal/problem", "events"}},
			{Path: "internal/refs", Holds: "which files of deleted checkpoints stay where later ones name them", Core: true, May: []string{"events"}},
			{Path: "internal/stragglers", Holds: "which nodes are slower than the others: a rule on times of iterations and saves", Core: true, May: []string{"events"}},
			{Path: "internal/insight", Holds: "verdicts on rows: job states, differences, metrics, reshard previews", Core: true, May: []string{"tensor", "projections", "internal/checkpoint", "planner"}},
			{Path: "internal/traces", Holds: "saves and loads as trees of spans, made from rows", Core: true, May: []string{"projections"}},
			{Path: "internal/audit", Holds: "tamper evidence: entries, tree, heads, run map, bundles, and their checks", May: []string{"internal/problem", "events"}, Core: true},
			{Path: "internal/audit/ledger", Holds: "the tamper evidence of a store on disk: tiles, heads, witnesses", May: []string{"internal/problem", "internal/httpkit", "internal/private", "internal/beneath", "internal/durable", "events", "internal/audit"}},
			{Path: "internal/archive", Holds: "sealed segments: the old part of a log, byte for byte, in files", May: []string{"internal/beneath", "internal/durable"}},
			{Path: "internal/front", Holds: "between an owner and its clients: authentication, and the filter of NATS protocol frames", May: []string{"events"}},
			{Path: "events/jetlog", Holds: "the log: archive and live stream as one; the client of NATS", May: []string{"internal/problem", "events", "internal/archive", "internal/front"}},
			{Path: "internal/signing", Holds: "the key of a process that signs its decisions, and which decisions a store takes", May: []string{"internal/problem", "events", "internal/audit", "internal/audit/ledger", "events/jetlog"}},
			{Path: "internal/logpeers", Holds: "the NATS servers of a log of three copies, on the nodes of a job", May: []string{"internal/problem", "internal/private", "internal/share", "internal/beneath", "internal/durable", "internal/claim"}},
			{Path: "projections/viewdb", Holds: "the views; alone imports Pebble's database", May: []string{"internal/problem", "events", "projections"}},
			{Path: "internal/query", Holds: "queries of the views, in process and over the owner's socket", May: []string{"internal/problem", "internal/httpkit", "events", "projections", "planner"}},
			{Path: "internal/object", Holds: "where bytes are kept: the interface"},
			{Path: "internal/object/local", Holds: "a directory as the place of the bytes", May: []string{"internal/beneath", "internal/disk", "internal/object"}},
			{Path: "internal/object/s3", Holds: "a bucket as the place of the bytes; alone imports minio-go", May: []string{"internal/problem", "internal/crc32c", "internal/object"}},
			{Path: "internal/object/objecttest", Holds: "the conformance suite of the interface", May: []string{"internal/crc32c", "internal/object"}},
			{Path: "internal/object/sigv4", Holds: "signatures of requests to S3 servers, for tests", NoDeps: true},
			{Path: "internal/object/faultproxy", Holds: "a proxy in front of an S3 server with counters, delays and faults, for tests", NoDeps: true, Closed: true, May: []string{"internal/object/sigv4"}},
			{Path: "internal/object/s3test", Holds: "an S3 server for tests, as a process", NoDeps: true, Closed: true, May: []string{"internal/object/sigv4"}},
			{Path: "internal/format/safetensors", Holds: "codec of safetensors files", Core: true, May: []string{"tensor"}},
			{Path: "internal/format/dcp", Holds: "codec of PyTorch's distributed checkpoints", Core: true, May: []string{"internal/problem", "tensor"}},
			{Path: "internal/data/blocks", Holds: "sets of blocks of a chunk, and boxes of its elements", Core: true, May: []string{"tensor", "internal/checkpoint"}},
			{Path: "internal/data/scan", Holds: "passes over bytes: windows, checksums of blocks, digests", May: []string{"internal/crc32c", "internal/checkpoint", "internal/object"}},
			{Path: "internal/data/reuse", Holds: "which chunks of a save need no writing: a checkpoint before it or the rank's own file has them", May: []string{"internal/crc32c", "tensor", "internal/checkpoint", "internal/data/scan"}},
			{Path: "internal/data/stream", Holds: "writes a data file while it computes the digests of its items", May: []string{"internal/crc32c", "internal/checkpoint", "internal/object", "internal/data/scan"}},
			{Path: "internal/data/segments", Holds: "the contents of a file that another program writes: digests of its tensors, and the bytes between them", May: []string{"internal/checkpoint", "internal/data/scan"}},
			{Path: "internal/data", Holds: "the data path: write, read, verify, repair, reuse and list a checkpoint's files", May: []string{"internal/problem", "internal/crc32c", "internal/beneath", "internal/disk", "tensor", "internal/checkpoint", "internal/object", "internal/object/local", "internal/format/safetensors", "internal/data/blocks", "internal/data/scan", "internal/data/reuse", "internal/data/stream", "internal/data/segments"}},
			{Path: "internal/foreign", Holds: "checkpoints of other programs: open in place, export", May: []string{"internal/problem", "internal/disk", "tensor", "internal/checkpoint", "internal/format/safetensors", "internal/format/dcp", "internal/data"}},
			{Path: "internal/store/place", Holds: "where the data of a store lies outside of its directory: a prefix of a bucket", May: []string{"internal/problem", "internal/object", "internal/object/s3"}},
			{Path: "internal/store/collection", Holds: "deletes the checkpoints that a policy does not keep, and removes what ended before", May: []string{"events", "events/jetlog", "projections", "planner", "internal/beneath", "internal/checkpoint", "internal/data", "internal/object", "internal/query", "internal/refs"}},
			{Path: "internal/store/blobs", Holds: "event bodies that are too large for the log, by their digest", May: []string{"internal/beneath", "internal/durable", "events", "internal/checkpoint", "internal/object"}},
			{Path: "internal/store/copier", Holds: "copies the files of a store, for a backup and a restore: durable, each checkpoint checked", May: []string{"projections", "internal/beneath", "internal/durable", "internal/checkpoint", "internal/data"}},
			{Path: "internal/store/holder", Holds: "whether the process that holds a lease has ended: its number, or a file that it keeps locked"},
			{Path: "internal/store/living", Holds: "the leases by which the nodes of a run show that their part of an attempt lives", May: []string{"internal/problem", "events/jetlog"}},
			{Path: "internal/store/sockets", Holds: "where the processes of one user find each other: directories of sockets, tokens of listeners", May: []string{"events/jetlog", "internal/private"}},
			{Path: "internal/store/space", Holds: "room on the disk of a store: what is refused first, the ballast", May: []string{"internal/beneath", "internal/durable", "internal/data"}},
			{Path: "internal/store/trusted", Holds: "a user's list of directories that are trusted although others can write to them", May: []string{"internal/problem", "internal/private", "internal/durable", "projections"}},
			{Path: "internal/store/views", Holds: "the views of a store in this process: on disk, or in memory while their directory fails; the past by them", May: []string{"internal/problem", "internal/share", "internal/beneath", "internal/durable", "internal/query", "internal/store/holder", "projections", "projections/viewdb"}},
			{Path: "internal/store/voids", Holds: "records by decisions the messages of the log that are not events", May: []string{"events", "events/jetlog", "projections"}},
			{Path: "internal/store", Holds: "a store: open, own, connect, collect, fork, recover, scrub, back up", May: []string{"internal/problem", "internal/redact", "internal/private", "internal/share", "internal/beneath", "internal/durable", "events", "projections", "internal/checkpoint", "planner", "internal/audit", "internal/audit/ledger", "internal/archive", "internal/front", "events/jetlog", "projections/viewdb", "internal/query", "internal/object", "internal/object/local", "internal/data", "internal/foreign", "internal/signing", "internal/claim", "internal/logpeers", "internal/store/place", "internal/store/blobs", "internal/store/collection", "internal/store/copier", "internal/store/holder", "internal/store/living", "internal/store/sockets", "internal/store/space", "internal/store/trusted", "internal/store/views", "internal/store/voids"}},
			{Path: "internal/launch/logs", Holds: "the workers' output in files: routes, rotation, following", May: []string{"internal/beneath"}},
			{Path: "internal/answer", Holds: "answers about a store: what commands print with --json and the HTTP API returns", May: []string{"internal/problem", "internal/attest", "tensor", "events", "projections", "internal/checkpoint", "planner", "internal/tune", "internal/insight", "internal/query", "internal/object", "internal/data", "internal/store", "internal/store/collection", "internal/launch/logs"}},
			{Path: "internal/api", Holds: "the HTTP API of a store: documents, pages, streams, decisions, users; alone imports huma", May: []string{"internal/problem", "internal/httpkit", "internal/private", "internal/durable", "events", "projections", "planner", "internal/insight", "internal/query", "internal/object", "internal/store", "internal/store/sockets", "internal/store/views", "internal/answer"}},
			{Path: "internal/otlp", Holds: "sends traces of saves and loads to a collector; alone imports OpenTelemetry's messages", May: []string{"internal/problem", "events", "projections", "internal/traces", "internal/query", "internal/store"}},
			{Path: "internal/observe", Holds: "the state of a store for a monitoring system: metrics, health, readiness", May: []string{"internal/query", "projections", "internal/insight", "internal/store", "internal/otlp"}},
			{Path: "internal/collective", Holds: "collectives on objects", NoDeps: true},
			{Path: "internal/rpc", Holds: "calls between processes: registry of backends, two kinds of agents", NoDeps: true, May: []string{"internal/collective"}},
			{Path: "client", Holds: "the library of a Go worker", NoDeps: true, May: []string{"internal/private", "tensor", "internal/collective", "internal/rpc"}},
			{Path: "client/function", Holds: "a training function that reports: the runner, the main of a worker", NoDeps: true, May: []string{"client"}},
			{Path: "gpu", Holds: "devices and their health; alone imports NVML. `gpu/ready` tries them out"},
			{Path: "internal/peer", Holds: "the process at the other end of a socket, and its end"},
			{Path: "internal/session/shm", Holds: "files in shared memory: ownership, reuse, leftovers of dead processes", May: []string{"internal/private"}},
			{Path: "internal/session/staging", Holds: "slots in shared memory that ranks save into", May: []string{"internal/problem", "internal/crc32c", "events", "internal/checkpoint", "internal/object", "internal/data", "internal/session/shm"}},
			{Path: "internal/preflight", Holds: "finds nodes with a bad network: rounds of pairs, their measurement, the verdicts", May: []string{"internal/httpkit"}},
			{Path: "internal/session/heirs", Holds: "which node writes what a lost node had sealed: orders to the nodes that keep its slots, one after the other", May: []string{"events", "internal/checkpoint"}},
			{Path: "internal/session/replica", Holds: "copies of sealed slots in the memory of another node: pairs, sender, keeper, what is written in the place of a lost node", May: []string{"internal/problem", "internal/crc32c", "internal/httpkit", "internal/checkpoint", "internal/session/shm", "internal/session/staging"}},
			{Path: "internal/session/broadcast", Holds: "blocks that several nodes want in a load, passed on by the node that reads them", May: []string{"internal/problem", "internal/httpkit"}},
			{Path: "internal/session/restore", Holds: "collective loads: resolved once for all ranks, each block read once", May: []string{"internal/problem", "tensor", "events", "projections", "internal/checkpoint", "planner", "internal/data", "client", "internal/session/staging", "internal/session/broadcast"}},
			{Path: "internal/session/pulse", Holds: "the signs of life of ranks: their requests", NoDeps: true},
			{Path: "internal/session/retry", Holds: "repeats the calls that a job's log does not answer; deadlines that leave that time out", NoDeps: true},
			{Path: "internal/session/handoff", Holds: "collects one report of each rank and appends them as one event; the answers to them", May: []string{"internal/problem", "events", "client", "internal/session/retry"}},
			{Path: "internal/session/dedup", Holds: "serves once the requests that are repeated because their answers were lost", NoDeps: true, May: []string{"internal/problem", "internal/httpkit"}},
			{Path: "internal/session/sweep", Holds: "removes the files of aborted saves once no node writes them", Core: true, NoDeps: true},
			{Path: "internal/session/mailbox", Holds: "what the ranks of an attempt send each other, in memory: messages, the key-value store", May: []string{"internal/problem", "internal/rpc", "client"}},
			{Path: "internal/session/outbox", Holds: "facts of a node's ranks on their way to the log: in order, and those of one phase of a save in one event", May: []string{"events", "internal/checkpoint"}},
			{Path: "internal/session/connections", Holds: "waits for the requests of a server that ends", NoDeps: true},
			{Path: "internal/session/contract", Holds: "holds the storage of a job to its contract", May: []string{"internal/checkpoint", "internal/data", "internal/session/retry"}},
			{Path: "internal/session", Holds: "one group of ranks, on one node or several: sockets, saves, loads, reports, collectives, decisions", May: []string{"internal/problem", "internal/httpkit", "internal/redact", "tensor", "events", "projections", "internal/checkpoint", "planner", "internal/data/reuse", "internal/data", "internal/collective", "internal/rpc", "client", "internal/peer", "internal/session/staging", "internal/session/heirs", "internal/session/replica", "internal/session/broadcast", "internal/session/restore", "internal/session/pulse", "internal/session/connections", "internal/session/contract", "internal/session/outbox", "internal/session/mailbox", "internal/session/sweep", "internal/session/dedup", "internal/session/handoff", "internal/session/retry", "internal/stragglers"}},
			{Path: "internal/auditreport", Holds: "what an auditor reads about a run, as JSON, Markdown and HTML", NoDeps: true, May: []string{"internal/bytesize", "internal/terminal", "events", "projections", "internal/audit", "internal/query", "internal/answer", "internal/session"}},
			{Path: "internal/launch/backend", Holds: "hooks of a communication backend around the life of a worker group", May: []string{"gpu"}},
			{Path: "internal/launch/stacks", Holds: "stacks of a process that hangs", NoDeps: true},
			{Path: "internal/launch/process", Holds: "the processes of one attempt: start, output, kill, guard", May: []string{"client"}},
			{Path: "internal/launch/blame", Holds: "what a failed attempt costs, and which node is bad: budgets, failures and losses in a row", Core: true, NoDeps: true},
			{Path: "internal/launch/standby", Holds: "processes that have imported modules and wait for their ranks", May: []string{"client", "internal/launch/process"}},
			{Path: "internal/launch/aftercommit", Holds: "what follows commits without delaying saves: collections, publications, a log of the disk", May: []string{"internal/data"}},
			{Path: "internal/launch", Holds: "one job, or this node's part of it: processes, restarts, hangs, devices, output, stops", May: []string{"internal/problem", "events", "projections", "internal/checkpoint", "internal/data", "internal/rpc", "client", "gpu", "internal/session/broadcast", "internal/session/restore", "internal/session/heirs", "internal/session/replica", "internal/session/pulse", "internal/session/dedup", "internal/session/handoff", "internal/session/retry", "internal/session", "internal/launch/blame", "internal/launch/backend", "internal/launch/stacks", "internal/launch/logs", "internal/launch/process", "internal/launch/standby", "internal/launch/aftercommit", "internal/httpkit", "internal/nodes", "internal/preflight"}},
			{Path: "internal/launches", Holds: "which jobs this user's trainers started, for `continue`", NoDeps: true, May: []string{"internal/private", "events"}},
			{Path: "internal/services/reading", Holds: "requests that look at checkpoints and read parts of them", May: []string{"internal/problem", "internal/httpkit", "tensor", "projections", "internal/checkpoint", "planner", "internal/query", "internal/data", "internal/store", "client", "internal/peer", "internal/session/shm"}},
			{Path: "internal/services/filesystem", Holds: "requests that write and read files of checkpoints, for fsspec", May: []string{"internal/problem", "internal/httpkit", "projections", "internal/checkpoint", "planner", "events/jetlog", "internal/query", "internal/object", "internal/data/segments", "internal/data", "internal/foreign", "internal/store", "internal/peer", "internal/session/shm", "internal/session", "internal/launch/process"}},
			{Path: "internal/services", Holds: "all requests about a store, for every process with a socket", May: []string{"internal/problem", "internal/httpkit", "internal/store", "internal/services/reading", "internal/services/filesystem"}},
			{Path: "internal/agent", Holds: "sessions of processes that no trainer started", May: []string{"internal/problem", "internal/httpkit", "projections", "events/jetlog", "internal/store", "client", "internal/peer", "internal/session/shm", "internal/session", "internal/launch", "internal/nodes"}},
			{Path: "internal/page", Holds: "the page of a store for browsers: its files, built from src, and their handler", May: []string{"internal/httpkit"}, NoDeps: true},
			{Path: "internal/console", Holds: "what both programs share of their command lines: streams, formats, usage errors, progress", May: []string{"internal/bytesize", "internal/problem", "internal/terminal"}},
			{Path: "internal/elements", Holds: "elements of a tensor as .npy files and text, and numpy's slices", Core: true, May: []string{"tensor"}},
			{Path: "internal/plot", Holds: "line charts as text", Core: true, NoDeps: true, May: []string{"internal/insight"}},
			{Path: "internal/slurm", Holds: "job scripts for Slurm, and the job of Slurm of this process", May: []string{"internal/store", "internal/console"}},
			{Path: "internal/audit/command", Holds: "the commands of `ckptstore audit` that make and check tamper evidence", May: []string{"internal/problem", "events", "internal/audit", "internal/audit/ledger", "internal/store", "internal/console"}},
			{Path: "internal/signing/command", Holds: "the parts of `ckptstore access` that are about keys", May: []string{"internal/problem", "events", "internal/audit", "internal/audit/ledger", "internal/signing", "internal/store", "internal/api", "internal/console"}},
			{Path: "internal/bench", Holds: "the benchmarks of `ckptstore bench`", May: []string{"internal/bytesize", "internal/crc32c", "tensor", "events", "projections", "internal/checkpoint", "planner", "internal/audit/ledger", "events/jetlog", "projections/viewdb", "internal/query", "internal/object", "internal/object/s3", "internal/data", "internal/store", "internal/store/collection", "client", "internal/session/shm", "internal/nodes", "internal/session", "internal/launch/process", "internal/launch", "internal/console"}},
			{Path: "internal/demo", Holds: "`trainer demo`: a small real model, its worker, and what the store does with them", May: []string{"tensor", "projections", "internal/checkpoint", "planner", "internal/query", "internal/object", "internal/data", "internal/store/place", "internal/store", "internal/collective", "client", "internal/session", "internal/launch", "internal/console"}},
			{Path: "client/collective", Holds: "object collectives for a Go worker", NoDeps: true, May: []string{"internal/collective", "client"}},
			{Path: "client/rpc", Holds: "the RPC registry and agents for a Go worker", NoDeps: true, May: []string{"internal/rpc", "client", "client/collective"}},
			{Path: "internal/doctor", Holds: "`trainer doctor`: problems of this machine that would hurt a job", May: []string{"internal/bytesize", "internal/problem", "internal/terminal", "gpu", "internal/session/shm", "internal/launch", "internal/console"}},
			{Path: "internal/trainer", Holds: "the program trainer: parse, start, report", May: []string{"internal/problem", "internal/problem/system", "internal/backstop", "internal/container", "internal/redact", "internal/terminal", "events", "projections", "internal/checkpoint", "planner", "internal/tune", "events/jetlog", "internal/query", "internal/data", "internal/signing", "internal/store", "internal/store/collection", "internal/answer", "gpu", "internal/session/shm", "internal/session/staging", "internal/session", "internal/launch/backend", "internal/launch/logs", "internal/launch/process", "internal/launch", "internal/launches", "internal/services", "internal/console", "internal/slurm", "internal/demo", "internal/doctor", "internal/nodes", "internal/logpeers", "internal/api", "internal/page", "internal/otlp", "internal/observe"}},
			{Path: "trainer", Holds: "a trainer of your own: `Main` with a backend, hooks and a storage", May: []string{"internal/checkpoint", "internal/data", "internal/launch/backend", "internal/trainer"}},
			{Path: "internal/natstest", Holds: "a NATS server and client for tests"},
			{Path: "internal/testbed/ethernet", Holds: "a switch in user space with slow, lossy and silent cables", NoDeps: true},
			{Path: "internal/testbed/netfs", Holds: "a network filesystem in user space with the caches of NFS, and faults"},
			{Path: "internal/testbed", Holds: "the nodes of a cluster on one machine, for tests: namespaces, a switch, a shared disk", May: []string{"internal/testbed/ethernet", "internal/testbed/netfs"}},
			{Path: "internal/manynodes", Holds: "jobs over several nodes of a testbed that are cut, frozen and killed at random, and judged", Closed: true, May: []string{"tensor", "client", "internal/testbed/ethernet", "internal/testbed/netfs", "internal/testbed"}},
			{Path: "cmd/ckptstore", Holds: "verbs: parse, call, print", Closed: true, May: []string{Any}},
			{Path: "cmd/trainer", Holds: "the package `trainer` without an option", Closed: true, May: []string{Any}},
			{Path: "internal/archtest", Holds: "this law, as a test", NoDeps: true, Closed: true},
			{Path: "internal/tested", Holds: "runs go test, and records which tests were skipped and why", NoDeps: true, Closed: true},
			{Path: "internal/storm/content", Holds: "the bytes that a storm saves", NoDeps: true},
			{Path: "internal/storm/check", Holds: "judges the store after a storm", NoDeps: true, May: []string{"internal/storm/content"}},
			{Path: "internal/storm", Holds: "kills and stops everything of a store at random", NoDeps: true, Closed: true, May: []string{"tensor", "client", "internal/storm/content", "internal/storm/check"}},
		},
		Engines: []Engine{
			{Prefix: "github.com/nats-io", Owners: []string{"events/jetlog", "internal/logpeers", "internal/natstest"}},
			{Prefix: "github.com/cockroachdb/pebble/v2/vfs", Owners: []string{"projections/viewdb", "internal/data", "internal/object/local", "internal/disk", "internal/foreign", "internal/store", "internal/store/views"}},
			{Prefix: "github.com/cockroachdb/pebble", Owners: []string{"projections/viewdb"}},
			{Prefix: "github.com/prometheus/client_golang", Owners: []string{"internal/observe"}},
			{Prefix: "go.opentelemetry.io", Owners: []string{"internal/otlp"}},
			{Prefix: "github.com/minio/minio-go", Owners: []string{"internal/object/s3"}},
			{Prefix: "github.com/danielgtaylor/huma", Owners: []string{"internal/api"}},
			{Prefix: "github.com/NVIDIA/go-nvml", Owners: []string{"gpu"}},
		},
		MaxFiles: 30,
		MaxLines: 700,
		MinLines: 60,
		Short: []Short{
			{"internal/launch/standby/command.go", "which commands can wait: another topic than the pool"},
			{"client/collective/collective.go", "the whole room"},
			{"client/copy_amd64.go", "one build"},
			{"client/copy_other.go", "the other build"},
			{"gpu/nvml_stub.go", "the build without NVML"},
			{"internal/crc32c/fold_amd64.go", "one build"},
			{"internal/crc32c/fold_other.go", "the other build"},
			{"cmd/trainer/main.go", "where the program begins"},
			{"internal/nodes/wish.go", "a file that two machines without a job have in common"},
			{"internal/insight/reshard.go", "one operation"},
			{"internal/trainer/cause.go", "one operation"},
			{"internal/trainer/publish.go", "one operation"},
			{"internal/backstop/backstop.go", "the whole room"},
			{"internal/bytesize/bytesize.go", "the whole room"},
			{"internal/nodes/clock.go", "one build"},
			{"internal/nodes/clock_testbed.go", "the build for a testbed"},
			{"internal/problem/system/system.go", "the whole room"},
			{"internal/testbed/doc.go", "the page of a large room"},
		},
		Public: 709,
	}
}

// impure are the standard packages that a core room may not import, each with
// everything below it.
var impure = []string{"os", "net", "log", "syscall", "crypto/rand"}

// clocked lists the names by which a standard package reads the clock or waits.
var clocked = map[string][]string{
	"time":    {"Now", "Since", "Until", "After", "AfterFunc", "NewTimer", "NewTicker", "Tick", "Sleep"},
	"context": {"WithTimeout", "WithTimeoutCause", "WithDeadline", "WithDeadlineCause"},
}

// drawers are package names that do not describe the content.
var drawers = []string{"util", "utils", "common", "helper", "helpers", "pkg"}
