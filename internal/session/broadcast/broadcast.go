// Package broadcast passes bytes that several nodes want in a load on between them, so that the
// storage reads them once.
//
//	Shares   what this node passes on: the handler of its peers' requests
//	Share    what it passes on in one load, to some nodes
//	Receive  takes what another node passes on
//
// The node that reads blocks gives them to its Share, once for all. Each receiver has a
// connection of its own, outside of the training's connections, and gets the blocks in the order
// in which they were read:
//
//	file ──▶ reader ──▶ Share ──┬── queue ──▶ node 1
//	                            ├── queue ──▶ node 2
//	                            └── queue ──▶ node 3
//
// Everything is best effort: a receiver can read each block from the files itself. So a node that
// does not take its blocks is dropped, and a node that is silent is left.
//
// # Requests
//
//	GET /v1/loads/ATTEMPT/LOAD/NODE   the blocks of a load for a node, as frames
//
// Package nodes authenticates both sides. All numbers of a frame are little-endian:
//
//	rank    uint32   that has saved the blocks
//	size    uint32   of the data in bytes; 0: the number is a signal
//	number  uint64   of the first block, or: 0 the sender lives, 1 everything was sent
//	data
//
// A stream without the last signal is incomplete. Nothing in it is trusted: the receiver compares
// each block with the checksum that its own copy of the index has.
package broadcast

import (
	"encoding/binary"
	"time"
)

// Path is the prefix of the requests.
const Path = "/v1/loads/"

// MaxFrame bounds the data of a frame in bytes.
const MaxFrame = 1 << 20

const (
	headerSize = 16
	packetSize = MaxFrame + 64<<10 // of frames that are sent together
	// window bounds the packets of a load that not all of their receivers have taken.
	window = 64
)

// The signals.
const (
	signalAlive = 0
	signalEnd   = 1
)

// Limits of the waiting of nodes for each other.
type Limits struct {
	Beat   time.Duration // pause after which a sender without blocks shows that it lives
	Silent time.Duration // longest silence: of a sender, or of a receiver that takes nothing
	Absent time.Duration // until a receiver's first request: it may allocate memory before
}

// Defaults are the limits of jobs.
var Defaults = Limits{Beat: time.Second, Silent: 5 * time.Second, Absent: 15 * time.Second}

// Frame is some blocks of a rank.
type Frame struct {
	Rank  int
	Block int64 // number of the first one
	Data  []byte
}

// appendHeader appends the header of a frame.
func appendHeader(to []byte, rank, size int, number int64) []byte {
	to = binary.LittleEndian.AppendUint32(to, uint32(rank))
	to = binary.LittleEndian.AppendUint32(to, uint32(size))
	return binary.LittleEndian.AppendUint64(to, uint64(number))
}

// header decodes the header of a frame.
func header(from []byte) (rank, size int, number int64) {
	return int(binary.LittleEndian.Uint32(from)), int(binary.LittleEndian.Uint32(from[4:])), int64(binary.LittleEndian.Uint64(from[8:]))
}
