// Package replica keeps copies of sealed slots in the memory of another node, so that a save
// survives the loss of the node that sealed it.
//
//	Partners   which node sends its slots to which
//	Sender     sends the sealed slots of this node's ranks to its partner
//	Keeper     receives slots of another node, and holds the newest whole ones of each rank;
//	           restores read it, also those of a node that replaces the lost one
//	Held       replicas that this node writes in the place of lost nodes
//
// Replication is best effort and never on the path of a save: a rank continues when its slot
// is sealed, and a partner that is slow, silent or gone costs the replica only.
//
// # Requests
//
// A sender connects to its partner, outside of the training's own connections. Package nodes
// authenticates both. All numbers are decimal.
//
//	POST /v1/replicas/begin                 announces a slot; the answer has an ID, or refuses
//	POST /v1/replicas/ID/blocks/N           block N of 4 MiB, and its CRC-32C after it
//	POST /v1/replicas/ID/whole              all blocks are sent: the slot becomes a replica
//	POST /v1/replicas/find                  describes the whole replica of a rank's part
//	POST /v1/replicas/read                  a block of it, with its CRC-32C in a header
//
// A request may be repeated. The keeper holds two slots of a rank at most: the last two whole
// ones, until a newer one is announced, which takes the memory of the older one. A slot is refused if a newer one of its rank is there.
package replica

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/ckptstore/ckptstore/internal/httpkit"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/session/staging"
)

// sumSize is the length of the CRC-32C that follows a block in the body of a request, little-endian: it is
// computed while the block is sent.
const sumSize = 4

// sumHeader has the CRC-32C of a block in an answer, in hexadecimal: it is known before.
const sumHeader = "Ckptstore-Crc32c"

// smallBody bounds the body of a request without a block, and of an answer.
const smallBody = 64 << 10

// Limits of one request. 4 MiB in blockTimeout are less than half a MiB in a second. The
// keeper allocates memory before it answers an announcement.
const (
	blockTimeout = 10 * time.Second
	beginTimeout = 2 * time.Minute
)

// maxSlot bounds the size of a slot that a keeper accepts, in bytes.
const maxSlot = 1 << 44

// beginRequest announces a slot.
type beginRequest struct {
	Attempt    int    `json:"attempt"`
	Rank       int    `json:"rank"`
	Checkpoint string `json:"checkpoint"`
	// Order counts the saves of an attempt as their sender has seen them: a higher one is newer.
	Order uint64 `json:"order"`
	Size  int64  `json:"size"`
}

// beginAnswer accepts a slot.
type beginAnswer struct {
	ID uint64 `json:"id"`
}

// nothing is the body of an answer without content.
type nothing struct{}

// part names the save and the rank of the slot.
func (b beginRequest) part() staging.Part {
	return staging.Part{Attempt: b.Attempt, Rank: b.Rank, Checkpoint: b.Checkpoint}
}

// answer decodes an answer into out. The error of a refusal has its kind.
func answer(reply *http.Response, out any) error {
	defer func() { _ = reply.Body.Close() }()
	data, err := io.ReadAll(io.LimitReader(reply.Body, smallBody))
	if err != nil {
		return err
	}
	if reply.StatusCode == http.StatusOK {
		return json.Unmarshal(data, out)
	}
	var of httpkit.Details
	if json.Unmarshal(data, &of) != nil || of.Detail == "" {
		return fmt.Errorf("the answer is not that of a trainer: status %s", reply.Status)
	}
	return problem.Errorf(of.Kind, "%s", of.Detail)
}
