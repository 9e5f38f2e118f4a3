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
	core := []string{"tensor", "events", "projections", "planner", "internal/checkpoint"}
	with := func(more ...string) []string { return append(more, core...) }
	return Law{
		Module: "github.com/ckptstore/ckptstore",
		Rooms: []Room{
			{Path: "tensor", Core: true},
			{Path: "events", Core: true, May: []string{"tensor"}},
			{Path: "projections", Core: true, May: []string{"tensor", "events"}},
			{Path: "planner", Core: true, May: core},
			{Path: "internal/checkpoint", Core: true, May: []string{"tensor", "events", "projections"}},

			{Path: "internal/archive", May: []string{"internal/beneath", "internal/durable"}},
			{Path: "internal/front", May: []string{"events"}},
			{Path: "events/jetlog", May: []string{"tensor", "events", "internal/archive", "internal/front"}},
			{Path: "projections/viewdb", May: core},
			{Path: "internal/data", May: []string{"tensor", "internal/checkpoint", "internal/format/safetensors", "internal/disk", "internal/object", "internal/object/local", "internal/beneath", "internal/crc32c"}},
			{Path: "internal/disk"},
			{Path: "internal/object"},
			{Path: "internal/object/local", May: []string{"internal/object", "internal/disk", "internal/beneath"}},
			{Path: "internal/object/objecttest", May: []string{"internal/object"}},
			{Path: "internal/foreign", May: []string{"tensor", "internal/checkpoint", "internal/data", "internal/disk", "internal/format/safetensors", "internal/format/dcp"}},
			{Path: "internal/format/safetensors", Core: true, May: []string{"tensor", "internal/checkpoint"}},
			{Path: "internal/format/dcp", Core: true, May: []string{"tensor", "internal/checkpoint"}},
			{Path: "gpu"},
			{Path: "internal/collective", NoDeps: true},
			{Path: "internal/rpc", May: []string{"internal/collective"}, NoDeps: true},
			{Path: "internal/launch", May: with("client", "internal/launch/process", "internal/launch/backend", "internal/launch/logs", "internal/launch/stacks", "internal/session/staging", "internal/session/restore", "internal/peer", "internal/data", "gpu", "internal/collective", "internal/rpc", "internal/redact")},
			{Path: "internal/launch/backend", May: []string{"gpu"}},
			{Path: "internal/session/shm", May: []string{"internal/private"}},
			{Path: "internal/session/staging", May: []string{"events", "internal/checkpoint", "internal/data", "internal/session/shm"}},
			{Path: "internal/session/restore", May: with("client", "internal/session/staging", "internal/data")},
			{Path: "internal/peer"},
			{Path: "internal/launch/process", May: []string{"client"}},
			{Path: "client", May: []string{"tensor", "internal/collective", "internal/rpc", "internal/private"}, NoDeps: true},
			{Path: "client/function", May: []string{"client"}, NoDeps: true},
			{Path: "internal/launch/logs", May: []string{"internal/beneath"}},
			{Path: "internal/launch/stacks", NoDeps: true},
			{Path: "internal/query", May: core},
			{Path: "internal/store", May: with("internal/archive", "events/jetlog", "internal/beneath", "internal/durable", "internal/private", "internal/redact", "internal/share", "projections/viewdb", "internal/data", "internal/foreign", "internal/query")},
			{Path: "internal/services/reading", May: with("internal/data", "internal/store", "internal/query", "client", "internal/session/shm", "internal/peer")},
			{Path: "internal/services", May: []string{"internal/store", "client", "internal/services/reading", "internal/services/filesystem"}},
			{Path: "internal/services/filesystem", May: with("events/jetlog", "internal/data", "internal/object", "internal/foreign", "internal/store", "internal/query", "internal/launch", "internal/session/shm", "internal/peer")},
			{Path: "internal/agent", May: with("internal/launch", "client", "internal/peer", "internal/session/shm", "internal/session/staging", "internal/store", "events/jetlog")},

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
			{Path: "internal/storm", May: []string{"internal/storm/check", "internal/storm/content", "client", "tensor"}, NoDeps: true, Closed: true},
			{Path: "internal/storm/check", May: []string{"internal/storm/content"}, NoDeps: true},
			{Path: "internal/storm/content", NoDeps: true},
		},
		Engines: []Engine{
			{Prefix: "github.com/nats-io", Owners: []string{"events/jetlog", "internal/natstest"}},
			{Prefix: "github.com/cockroachdb/pebble/v2/vfs", Owners: []string{"projections/viewdb", "internal/data", "internal/object/local", "internal/disk", "internal/foreign", "internal/store"}},
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
