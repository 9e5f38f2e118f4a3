package client

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"slices"
	"sync"
)

// knownPlans is the number of plans that a trainer keeps for a rank.
const knownPlans = 4

// plans caches the items that the trainer knows, with the token of each set, so
// that a save of an unchanged state need not list them again.
type plans struct {
	mu    sync.Mutex
	known []sentPlan // the last one is the most recently added
}

type sentPlan struct {
	items   []Item // without checks
	token   string
	offsets []int64 // of the items in a slot
}

// find returns the token of items and their offsets in a slot, or "" if the
// trainer does not know them.
func (p *plans) find(items []Item) (token string, offsets []int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, sent := range p.known {
		if slices.EqualFunc(sent.items, items, sameItem) {
			return sent.token, sent.offsets
		}
	}
	return "", nil
}

func (p *plans) add(items []Item, token string, offsets []int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if token == "" || offsets == nil {
		return
	}
	p.known = slices.DeleteFunc(p.known, func(sent sentPlan) bool { return sent.token == token })
	if len(p.known) == knownPlans {
		p.known = slices.Delete(p.known, 0, 1)
	}
	own := slices.Clone(items) // the caller may change its shapes and boxes
	for i, it := range own {
		own[i].Shape, own[i].Offsets, own[i].Sizes = slices.Clone(it.Shape), slices.Clone(it.Offsets), slices.Clone(it.Sizes)
	}
	p.known = append(p.known, sentPlan{own, token, offsets})
}

func sameItem(a, b Item) bool {
	return a.FQN == b.FQN && a.Value == b.Value && a.PerRank == b.PerRank && a.DType == b.DType && a.Bytes == b.Bytes &&
		slices.Equal(a.Shape, b.Shape) && slices.Equal(a.Offsets, b.Offsets) && slices.Equal(a.Sizes, b.Sizes)
}

// A check covers all of an item up to 1 MiB, and samples of a larger one, so that
// the first save need not read all bytes.
const (
	fullCheck   = 1 << 20
	sample      = 4 << 10
	checkLength = 16
)

// checked returns items with checks for those that other ranks may also hold.
func (s State) checked(items []Item, world int) []Item {
	if world == 1 {
		return items
	}
	items = slices.Clone(items)
	for i := range items {
		switch {
		case i < len(s.Tensors):
			items[i].Check = check(s.Tensors[i].Data)
		case !items[i].PerRank:
			items[i].Check = check(s.Values[i-len(s.Tensors)].Data)
		}
	}
	return items
}

// check returns a short digest of data.
func check(data []byte) string {
	h := sha256.New()
	h.Write(binary.LittleEndian.AppendUint64(nil, uint64(len(data))))
	if len(data) <= fullCheck {
		h.Write(data)
	} else {
		const samples = fullCheck / sample
		for i := range samples { // from the first byte to the last
			at := (len(data) - sample) / (samples - 1) * i
			if i == samples-1 {
				at = len(data) - sample
			}
			h.Write(data[at : at+sample])
		}
	}
	return hex.EncodeToString(h.Sum(nil)[:checkLength])
}
