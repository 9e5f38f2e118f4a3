// Package archtest holds the architecture of this repository as a check: which
// room may import which, which room owns which engine, and how every package
// is documented. Its test fails with one [Finding] for each breach.
//
//	room     a directory with a law of its own; a directory below it without
//	         one belongs to it (cmd/trainer/digits to cmd/trainer)
//	core     a room that is pure: it touches no file, no network and no log
//	         output, and never reads the clock
//	engine   a foreign module that only the rooms named may import
//	law      all of these together, as data
//
// Only direct imports of files that are not tests are judged: a test may
// bring the engine that its room is kept from. Directories named testdata or
// vendor, hidden ones and nested modules are not part of the tree, and files
// under the constraint "ignore" are not part of a package.
package archtest

// Law is what a tree of packages is held to.
type Law struct {
	Module   string // import path of the tree's root
	Rooms    []Room
	Engines  []Engine // the first whose prefix matches an import decides
	MaxLines int      // of a file that is neither a test nor generated
}

// Room is one directory with its rights. It may always import itself.
type Room struct {
	Path   string   // slash-separated, relative to the root
	May    []string // paths of the rooms that it may import; [Any] for all
	Core   bool     // see the package comment
	NoDeps bool     // of foreign code, only the standard library
	Closed bool     // no other room may import it, whatever their May says
}

// Any in a room's May stands for every room that is not closed.
const Any = "*"

// Engine is a foreign module, or a part of one, with the rooms that own it.
type Engine struct {
	Prefix string // whole path elements of the import path
	Owners []string
}

// Repository is the law of this repository.
func Repository() Law {
	core := []string{"tensor", "events", "projections", "planner", "planner/plan"}
	with := func(more ...string) []string { return append(more, core...) }
	return Law{
		Module: "github.com/ckptstore/ckptstore",
		Rooms: []Room{
			{Path: "tensor", Core: true},
			{Path: "events", Core: true, May: []string{"tensor"}},
			{Path: "projections", Core: true, May: []string{"tensor", "events"}},
			{Path: "planner", Core: true, May: core},
			{Path: "planner/plan", Core: true, May: []string{"tensor", "events", "projections"}},

			{Path: "events/archive", May: []string{"internal/beneath", "internal/durable"}},
			{Path: "events/front", May: []string{"events"}},
			{Path: "events/jetlog", May: []string{"tensor", "events", "events/archive", "events/front"}},
			{Path: "projections/viewdb", May: core},
			{Path: "storage", May: []string{"tensor", "planner/plan", "storage/safetensors", "storage/disk", "storage/backend", "storage/backend/local", "internal/beneath", "internal/crc32c"}},
			{Path: "storage/disk"},
			{Path: "storage/backend"},
			{Path: "storage/backend/local", May: []string{"storage/backend", "storage/disk", "internal/beneath"}},
			{Path: "storage/backend/backendtest", May: []string{"storage/backend"}},
			{Path: "storage/foreign", May: []string{"tensor", "planner/plan", "storage", "storage/disk", "storage/safetensors", "storage/dcp"}},
			{Path: "storage/safetensors", Core: true, May: []string{"tensor", "planner/plan"}},
			{Path: "storage/dcp", Core: true, May: []string{"tensor", "planner/plan"}},
			{Path: "gpu"},
			{Path: "dist", NoDeps: true},
			{Path: "dist/rpc", May: []string{"dist"}, NoDeps: true},
			{Path: "worker", May: with("worker/client", "worker/process", "worker/backend", "worker/logs", "worker/stacks", "worker/staging", "worker/restore", "worker/peer", "storage", "gpu", "dist", "dist/rpc", "internal/redact")},
			{Path: "worker/backend", May: []string{"gpu"}},
			{Path: "worker/shm", May: []string{"internal/private"}},
			{Path: "worker/staging", May: []string{"events", "planner/plan", "storage", "worker/shm"}},
			{Path: "worker/restore", May: with("worker/client", "worker/staging", "storage")},
			{Path: "worker/peer"},
			{Path: "worker/process", May: []string{"worker/client"}},
			{Path: "worker/client", May: []string{"tensor", "dist", "dist/rpc", "internal/private"}, NoDeps: true},
			{Path: "worker/function", May: []string{"worker/client"}, NoDeps: true},
			{Path: "worker/logs", May: []string{"internal/beneath"}},
			{Path: "worker/stacks", NoDeps: true},
			{Path: "web", May: core},
			{Path: "store", May: with("events/archive", "events/jetlog", "internal/beneath", "internal/durable", "internal/private", "internal/redact", "internal/share", "projections/viewdb", "storage", "storage/foreign", "web")},
			{Path: "agent/reading", May: with("storage", "store", "web", "worker/client", "worker/shm", "worker/peer")},
			{Path: "agent/services", May: []string{"store", "worker/client", "agent/reading", "agent/filesystem"}},
			{Path: "agent/filesystem", May: with("events/jetlog", "storage", "storage/backend", "storage/foreign", "store", "web", "worker", "worker/shm", "worker/peer")},
			{Path: "agent", May: with("worker", "worker/client", "worker/peer", "worker/shm", "worker/staging", "store", "events/jetlog")},

			{Path: "cmd/ckptstore", May: []string{Any}, Closed: true},
			{Path: "cmd/trainer", May: []string{Any}, Closed: true},
			{Path: "internal/bytesize", NoDeps: true},
			{Path: "internal/crc32c"},
			{Path: "internal/backstop", NoDeps: true},
			{Path: "internal/launches", May: []string{"events", "internal/private"}, NoDeps: true},
			{Path: "internal/redact", Core: true, NoDeps: true},
			{Path: "internal/terminal", Core: true, NoDeps: true},
			{Path: "internal/private", NoDeps: true},
			{Path: "internal/natstest"},
			{Path: "internal/share"},
			{Path: "internal/beneath", May: []string{"internal/share"}},
			{Path: "internal/durable", May: []string{"internal/beneath", "internal/share"}, NoDeps: true},
			{Path: "internal/archtest", NoDeps: true, Closed: true},
			{Path: "internal/storm", May: []string{"internal/storm/check", "internal/storm/content", "worker/client", "tensor"}, NoDeps: true, Closed: true},
			{Path: "internal/storm/check", May: []string{"internal/storm/content"}, NoDeps: true},
			{Path: "internal/storm/content", NoDeps: true},
		},
		Engines: []Engine{
			{Prefix: "github.com/nats-io", Owners: []string{"events/jetlog", "internal/natstest"}},
			{Prefix: "github.com/cockroachdb/pebble/v2/vfs", Owners: []string{"projections/viewdb", "storage", "storage/backend/local", "storage/disk", "storage/foreign", "store"}},
			{Prefix: "github.com/cockroachdb/pebble", Owners: []string{"projections/viewdb"}},
			{Prefix: "github.com/NVIDIA/go-nvml", Owners: []string{"gpu"}},
		},
		MaxLines: 400,
	}
}

// impure are the standard packages that a core room may not import, each with
// everything below it.
var impure = []string{"os", "net", "log", "syscall", "crypto/rand"}

// clocked are the names by which a standard package reads the clock or waits.
var clocked = map[string][]string{
	"time":    {"Now", "Since", "Until", "After", "AfterFunc", "NewTimer", "NewTicker", "Tick", "Sleep"},
	"context": {"WithTimeout", "WithTimeoutCause", "WithDeadline", "WithDeadlineCause"},
}

// drawers are package names that say nothing about what is inside.
var drawers = []string{"util", "utils", "common", "helper", "helpers", "pkg"}
