package restore

import (
	"context"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/internal/data"
)

// The nodes of a load tell the [Meeting] which blocks they would read from files. It answers which
// of them several nodes want, so that one node reads them for all.

// ShareRequest has the blocks that a node reads from files in a load, if no other node does.
type ShareRequest struct {
	Key
	Ranges []data.BlockRange `json:"ranges,omitempty"` // none: the node reads what it needs alone
}

// ShareReply has the blocks that the node shares with others.
type ShareReply struct {
	Shared []SharedRange `json:"shared,omitempty"` // rising by rank and block
	Nodes  [][]int       `json:"nodes,omitempty"`  // sets of nodes, ascending
	Peers  map[int]Peer  `json:"peers,omitempty"`  // of all these nodes
}

// SharedRange is a run of blocks that a set of nodes wants.
type SharedRange struct {
	data.BlockRange
	Set int `json:"set"` // in Nodes
}

// Peer is where a node serves the requests of other nodes.
type Peer struct {
	URL string `json:"url"`
	Pin string `json:"pin"` // digest of its certificate
}

// Bounds of what is shared. A range of fewer blocks costs more to pass on than to read; and many
// short ones are what one node reads between those of another.
const (
	leastShared = 16 // blocks of a range
	mostRanges  = 1 << 16
	mostWanted  = 1 << 20 // ranges of all nodes: those of a node beyond that are not shared
	mostNodes   = 32      // in a set: more are several sets, each of which reads the blocks once
)

// shareLimit bounds how long nodes wait for the requests of others. Some verify their slots first.
const shareLimit = 10 * time.Second

// sharing is what the nodes of a load share.
type sharing struct {
	wants map[int][]data.BlockRange // by node
	held  int                       // ranges in wants
	known chan struct{}             // closed when reply is known
	limit *time.Timer
	reply ShareReply // for all nodes
}

// Share answers a node: see [Coordinator].
func (m *Meeting) Share(ctx context.Context, node int, req ShareRequest) (ShareReply, error) {
	m.mu.Lock()
	g, err := m.find(node, req.Key)
	if err == nil && (!g.isResolved() || g.reply.Failure != nil) {
		err = &ConflictError{errOver}
	}
	var s *sharing
	if err == nil {
		s = m.want(g, node, req.Ranges)
	}
	m.mu.Unlock()
	if err != nil || s == nil || len(req.Ranges) == 0 {
		return ShareReply{}, err
	}
	select {
	case <-s.known:
		return s.reply.of(node), nil
	case <-ctx.Done():
		return ShareReply{}, ctx.Err()
	}
}

// want adds what a node wants. The last one ends the wait. It returns nil if nothing can be
// shared. The caller holds the lock.
func (m *Meeting) want(g *gathering, node int, ranges []data.BlockRange) *sharing {
	if m.cfg.Peer == nil || g.ending {
		return nil
	}
	awaited := 0
	for other, ranks := range g.parts {
		if len(ranks) > 0 && m.cfg.Peer(other).URL != "" {
			awaited++
		}
	}
	if awaited < 2 || m.cfg.Peer(node).URL == "" {
		return nil
	}
	s := g.sharing
	if s == nil {
		s = &sharing{wants: map[int][]data.BlockRange{}, known: make(chan struct{})}
		g.sharing = s
		s.limit = time.AfterFunc(shareLimit, func() {
			m.mu.Lock()
			defer m.mu.Unlock()
			s.divide(m.cfg.Peer)
		})
	}
	if s.wants == nil {
		return s // the reply is without a node that comes now
	}
	if _, again := s.wants[node]; !again {
		if s.held+len(ranges) > mostWanted {
			ranges = nil
		}
		s.wants[node] = ranges
		s.held += len(ranges)
	}
	if len(s.wants) == awaited {
		s.divide(m.cfg.Peer)
	}
	return s
}

// divide ends the wait for further nodes. The division of a million ranges takes seconds: it
// runs without the lock of the meeting, which the caller holds.
func (s *sharing) divide(peer func(node int) Peer) {
	if s == nil || s.wants == nil {
		return
	}
	s.limit.Stop()
	wants, peers := s.wants, map[int]Peer{}
	s.wants = nil
	for node := range wants {
		peers[node] = peer(node)
	}
	go func() {
		defer close(s.known)
		s.reply = divide(wants)
		s.reply.Peers = peers
	}()
}

// of returns the part of a reply that concerns a node.
func (r ShareReply) of(node int) (out ShareReply) {
	at := map[int]int{} // new number of a set
	for i, set := range r.Nodes {
		if !slices.Contains(set, node) {
			continue
		}
		at[i] = len(out.Nodes)
		out.Nodes = append(out.Nodes, set)
		for _, other := range set {
			if out.Peers == nil {
				out.Peers = map[int]Peer{}
			}
			out.Peers[other] = r.Peers[other]
		}
	}
	for _, of := range r.Shared {
		if set, has := at[of.Set]; has {
			out.Shared = append(out.Shared, SharedRange{of.BlockRange, set})
		}
	}
	return out
}

// edge is where a node begins or ceases to want blocks.
type edge struct {
	rank   int
	at     int64
	node   int
	begins bool
}

// divide returns which blocks several nodes want. It is a pure function.
func divide(wants map[int][]data.BlockRange) (out ShareReply) {
	var edges []edge
	for node, ranges := range wants {
		for _, r := range ranges {
			if r.Lo < r.Hi {
				edges = append(edges, edge{r.Rank, r.Lo, node, true}, edge{r.Rank, r.Hi, node, false})
			}
		}
	}
	slices.SortFunc(edges, func(a, b edge) int {
		if a.rank != b.rank {
			return a.rank - b.rank
		}
		return int(a.at - b.at)
	})
	sets := newNodeSets(&out)
	count := map[int]int{} // of ranges that are open, by node: those of a node may overlap
	var now []int          // nodes that want the blocks from here on, ascending
	for i := 0; i < len(edges); {
		at := edges[i]
		for ; i < len(edges) && edges[i].rank == at.rank && edges[i].at == at.at; i++ {
			e := edges[i]
			was := count[e.node]
			if e.begins {
				count[e.node]++
			} else {
				count[e.node]--
			}
			if place, has := slices.BinarySearch(now, e.node); !has && was == 0 {
				now = slices.Insert(now, place, e.node)
			} else if has && count[e.node] == 0 {
				now = slices.Delete(now, place, place+1)
			}
		}
		if i < len(edges) && edges[i].rank == at.rank {
			sets.add(data.BlockRange{Rank: at.rank, Lo: at.at, Hi: edges[i].at}, now)
		}
	}
	out.Shared = slices.DeleteFunc(out.Shared, func(r SharedRange) bool { return r.Hi-r.Lo < leastShared })
	return out
}

// nodeSets numbers sets of nodes.
type nodeSets struct {
	to     *ShareReply
	number map[string]int
	last   map[int]int // range of a set that may continue
}

func newNodeSets(to *ShareReply) *nodeSets {
	return &nodeSets{to: to, number: map[string]int{}, last: map[int]int{}}
}

// add adds blocks that nodes want, for each mostNodes of them.
func (s *nodeSets) add(blocks data.BlockRange, nodes []int) {
	for group := range slices.Chunk(nodes, mostNodes) {
		if len(group) < 2 {
			continue
		}
		key := keyOfNodes(group)
		set, known := s.number[key]
		if !known {
			set = len(s.to.Nodes)
			s.number[key] = set
			s.to.Nodes = append(s.to.Nodes, slices.Clone(group))
		}
		if at, has := s.last[set]; has {
			if last := &s.to.Shared[at]; last.Rank == blocks.Rank && last.Hi == blocks.Lo {
				last.Hi = blocks.Hi
				continue
			}
		}
		s.last[set] = len(s.to.Shared)
		s.to.Shared = append(s.to.Shared, SharedRange{blocks, set})
	}
}

func keyOfNodes(nodes []int) string {
	key := make([]byte, 0, 4*len(nodes))
	for _, n := range nodes {
		key = append(key, byte(n), byte(n>>8), byte(n>>16), byte(n>>24))
	}
	return string(key)
}
