package restore

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sort"
	"sync"
	"time"

	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/session/broadcast"
	"github.com/ckptstore/ckptstore/internal/session/staging"
)

// shared is what a node reads for other nodes in a load, and what others read for it. The blocks
// of a range are divided between its nodes in runs, one node after the other, which all of them
// compute alike.
type shared struct {
	l      *Loader
	n      int                       // number of the load
	node   int                       // this node
	ranges map[int][]SharedRange     // by rank, rising
	own    []SharedRange             // that this node reads
	in     map[int][]data.BlockRange // that others read, by node
	sets   [][]int                   // the nodes of a set but this one
	peers  map[int]Peer
	out    *broadcast.Share
	read   chan struct{} // closed when all own ranges are read
}

// runBlocks is the number of adjacent blocks that one node reads: 8 MiB.
const runBlocks = 128

// share finds out which blocks of this load other nodes want too. It asks after the node knows
// what it has in memory, so that only what comes from files is shared.
func (r *restore) share(ctx context.Context, held staging.Copies) error {
	cfg := &r.l.cfg
	if cfg.Coordinator == nil {
		return nil
	}
	req := ShareRequest{Key: r.key}
	files, ok := r.reader.(*data.FileReader)
	var blocks [][]data.BlockRange
	var whose [][2]int // rank and want of each read
	if ok && cfg.Shares != nil && !r.l.alone.Load() {
		var err error
		if blocks, whose, err = r.fileBlocks(ctx, files, held); err != nil {
			return err
		}
		if req.Ranges = mergeRanges(blocks); len(req.Ranges) > mostRanges {
			req.Ranges = nil
		}
	}
	reply, err := cfg.Coordinator.Share(ctx, req)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		cfg.Logger.Warn("blocks not shared with other nodes; reading files alone", "load", r.n, "error", err)
		return nil
	}
	if len(reply.Shared) == 0 || len(req.Ranges) == 0 {
		return nil
	}
	s := newShared(r.l, r.n, reply)
	s.open()
	for i, of := range blocks {
		if slices.ContainsFunc(of, s.has) {
			own := &r.ranks[whose[i][0]]
			if own.shared == nil {
				own.shared = make([]bool, len(own.wants))
			}
			own.shared[whose[i][1]] = true
		}
	}
	r.shared = s
	return nil
}

// unshare has this node read alone.
func (r *restore) unshare() {
	r.shared.end()
	r.shared = nil
	for rank := range r.ranks {
		r.ranks[rank].shared = nil
	}
}

// fileBlocks returns the blocks of the reads whose chunks are not in memory here.
func (r *restore) fileBlocks(ctx context.Context, files *data.FileReader, held staging.Copies) (blocks [][]data.BlockRange, whose [][2]int, err error) {
	var wants []checkpoint.Want
	var reads []checkpoint.Read
	for rank := range r.ranks {
		of := &r.ranks[rank]
		base := len(wants)
		wants = append(wants, of.wants...)
		for _, read := range of.reads {
			if _, _, staged := held.Find(read.Rank, itemOf(of.wants[read.Want], read)); staged {
				continue
			}
			whose = append(whose, [2]int{rank, read.Want})
			read.Want += base
			reads = append(reads, read)
		}
	}
	blocks, err = files.BlocksOf(ctx, wants, reads)
	return blocks, whose, err
}

// mergeRanges returns the union of ranges, by rank, rising and with a gap between any two.
func mergeRanges(of [][]data.BlockRange) (out []data.BlockRange) {
	all := slices.Concat(of...)
	slices.SortFunc(all, func(a, b data.BlockRange) int {
		if a.Rank != b.Rank {
			return a.Rank - b.Rank
		}
		return int(a.Lo - b.Lo)
	})
	for _, r := range all {
		if last := len(out) - 1; last >= 0 && out[last].Rank == r.Rank && r.Lo <= out[last].Hi {
			out[last].Hi = max(out[last].Hi, r.Hi)
		} else {
			out = append(out, r)
		}
	}
	return out
}

// newShared divides the ranges of a reply between the nodes.
func newShared(l *Loader, n int, reply ShareReply) *shared {
	s := &shared{l: l, n: n, node: l.cfg.Node, ranges: map[int][]SharedRange{}, in: map[int][]data.BlockRange{}, peers: reply.Peers, read: make(chan struct{})}
	for _, set := range reply.Nodes {
		s.sets = append(s.sets, slices.DeleteFunc(slices.Clone(set), func(node int) bool { return node == s.node }))
	}
	for _, of := range reply.Shared {
		s.ranges[of.Rank] = append(s.ranges[of.Rank], of)
		nodes := reply.Nodes[of.Set]
		for lo := of.Lo; lo < of.Hi; {
			run := lo / runBlocks
			hi := min((run+1)*runBlocks, of.Hi)
			part := data.BlockRange{Rank: of.Rank, Lo: lo, Hi: hi}
			if reader := nodes[(int(run)+of.Rank)%len(nodes)]; reader == s.node {
				s.own = append(s.own, SharedRange{part, of.Set})
			} else {
				s.in[reader] = append(s.in[reader], part)
			}
			lo = hi
		}
	}
	return s
}

// open opens what this node passes on: the receivers may come from now on.
func (s *shared) open() {
	to := map[int]bool{}
	for _, of := range s.own {
		for _, node := range s.sets[of.Set] {
			to[node] = true
		}
	}
	s.out = s.l.cfg.Shares.Open(s.l.cfg.Attempt, s.n, slices.Sorted(maps.Keys(to)))
}

// has reports whether some of the blocks are shared.
func (s *shared) has(b data.BlockRange) bool {
	of := s.ranges[b.Rank]
	at := sort.Search(len(of), func(i int) bool { return of[i].Hi > b.Lo })
	return at < len(of) && of[at].Lo < b.Hi
}

// end ends what this node passes on. Without an earlier end, not all was.
func (s *shared) end() {
	if s != nil {
		s.out.End(false)
	}
}

// passing returns the load's division for its reader.
func (s *shared) passing() data.Passing {
	p := data.Passing{Out: s.pass, Receive: s.receive, Read: func() {
		s.out.End(true)
		close(s.read)
	}}
	for _, of := range s.own {
		p.Own = append(p.Own, of.BlockRange)
	}
	for _, of := range s.in {
		p.In = append(p.In, of...)
	}
	return p
}

// pass passes blocks on that this node has read.
func (s *shared) pass(ctx context.Context, b data.PassedBlocks) error {
	of := s.ranges[b.Rank]
	at := sort.Search(len(of), func(i int) bool { return of[i].Hi > b.Block })
	if at == len(of) || b.Block < of[at].Lo {
		return fmt.Errorf("block %d of rank %d is not shared", b.Block, b.Rank)
	}
	return s.out.Pass(ctx, s.sets[of[at].Set], broadcast.Frame{Rank: b.Rank, Block: b.Block, Data: b.Data})
}

// errLate ends the wait for a node that is slower than all others.
var errLate = errors.New("the node is much slower than the others")

// receive takes what other nodes have read, from all of them at the same time. It does not wait
// for a node that is silent, nor much longer for a node that is slower than the others.
func (s *shared) receive(ctx context.Context, take func(data.PassedBlocks) error) {
	ctx, stop := context.WithCancelCause(ctx)
	defer stop(nil)
	limits := s.l.cfg.Shares.Limits()
	began := time.Now()
	ended := make(chan struct{}, len(s.in))
	var all sync.WaitGroup
	for node := range s.in {
		all.Go(func() {
			defer func() { ended <- struct{}{} }()
			to := s.peers[node]
			err := broadcast.Receive(ctx, broadcast.Peer{URL: to.URL, Client: s.l.cfg.PeerClient(to.Pin)}, s.l.cfg.Attempt, s.n, s.node, limits, func(f broadcast.Frame) error {
				return take(data.PassedBlocks{Rank: f.Rank, Block: f.Block, Data: f.Data})
			})
			if err != nil && (ctx.Err() == nil || errors.Is(context.Cause(ctx), errLate)) {
				s.l.alone.Store(true)
				s.l.cfg.Logger.Warn("blocks of a load not passed on by another node; reading files instead, here also in later loads of the attempt",
					"load", s.n, "node", node, "after", time.Since(began).Round(time.Millisecond), "error", err)
			}
		})
	}
	defer all.Wait()
	read, late := s.read, (<-chan time.Time)(nil)
	var timer *time.Timer
	for left := len(s.in); left > 0; {
		select {
		case <-ended:
			left--
		case <-read:
			read = nil
		case <-late:
			stop(errLate)
			return
		}
		if late == nil && read == nil && 2*(len(s.in)-left) >= len(s.in)-1 {
			timer = time.NewTimer(max(limits.Silent, time.Since(began)))
			defer timer.Stop()
			late = timer.C
		}
	}
}
