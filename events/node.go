package events

import (
	"encoding/hex"
	"errors"
	"fmt"
	"iter"
	"slices"
	"strings"
	"time"
)

// Bodies about the ranks of one node. A save of a group over several nodes would otherwise
// take three events of each rank: each of these stands for one event of every rank in it.
// Columns have one value for each rank, in the order of the ranks. A column of integers with
// one value has the same value for all ranks.

// RankRun is a run of consecutive ranks.
type RankRun struct {
	First int `json:"first"` // lowest rank
	Count int `json:"count"` // number of ranks, at least 1
}

// maxNodeRanks bounds the ranks of one event of a node.
const maxNodeRanks = 1 << 16

// maxRank bounds a rank, and the ranks of a group that are placed by node.
const maxRank = 1 << 20

// RankRuns returns the runs of ascending ranks.
func RankRuns(ranks []int) (runs []RankRun) {
	for _, rank := range ranks {
		if n := len(runs); n > 0 && runs[n-1].First+runs[n-1].Count == rank {
			runs[n-1].Count++
			continue
		}
		runs = append(runs, RankRun{First: rank, Count: 1})
	}
	return runs
}

// RanksIn is the inverse of [RankRuns].
func RanksIn(runs []RankRun) (ranks []int) {
	for _, run := range runs {
		for i := range run.Count {
			ranks = append(ranks, run.First+i)
		}
	}
	return ranks
}

// checkRuns returns the number of ranks in runs, which are ascending.
func checkRuns(runs []RankRun) (n int, err error) {
	next := 0
	for _, run := range runs {
		if run.First < next || run.First > maxRank || run.Count < 1 || run.Count > maxNodeRanks {
			return 0, fmt.Errorf("ranks %d and %d more are no run of ascending ranks", run.First, run.Count-1)
		}
		next = run.First + run.Count
		n += run.Count
	}
	if n == 0 || n > maxNodeRanks {
		return 0, fmt.Errorf("%d ranks, want 1 to %d", n, maxNodeRanks)
	}
	return n, nil
}

// column returns the shortest form of one value for each rank.
func column[T comparable](values []T) []T {
	if len(values) > 1 && !slices.ContainsFunc(values, func(v T) bool { return v != values[0] }) {
		return values[:1:1]
	}
	return values
}

// at returns the value of the i-th rank in a column.
func at[T any](column []T, i int) T {
	if len(column) == 1 {
		return column[0]
	}
	return column[i]
}

func checkColumn[T any](name string, column []T, ranks int) error {
	if len(column) != 1 && len(column) != ranks {
		return fmt.Errorf("%s has %d values for %d ranks", name, len(column), ranks)
	}
	return nil
}

// unknown stands for an unknown duration in a column.
const unknown = -1

// durations returns the column of durations. Nil is an unknown one. Without a known one
// there is no column.
func durations(seconds []*float64) []float64 {
	values, known := make([]float64, len(seconds)), false
	for i, s := range seconds {
		values[i] = unknown
		if s != nil {
			values[i], known = *s, true
		}
	}
	if !known {
		return nil
	}
	return column(values)
}

// durationAt returns the duration of the i-th rank, or nil.
func durationAt(column []float64, i int) *float64 {
	if len(column) == 0 {
		return nil
	}
	v := at(column, i)
	if v < 0 {
		return nil
	}
	return &v
}

func checkDurations(name string, column []float64, ranks int) error {
	if len(column) == 0 {
		return nil
	}
	return checkColumn(name, column, ranks)
}

// Seconds returns a duration in the form of the bodies: seconds, in whole microseconds.
func Seconds(d time.Duration) *float64 {
	s := float64(max(d, 0).Round(time.Microsecond)/time.Microsecond) / 1e6
	return &s
}

// digestBytes is the size of a digest.
const digestBytes = 32

// NodePlan records that ranks of one node save by plans that the log has. It stands for a
// plan.local of each rank with its fingerprint only. A digest stands for fingerprints that
// an earlier plan.node of the same ranks lists.
type NodePlan struct {
	Attempt      int       `json:"attempt"`
	Checkpoint   string    `json:"checkpoint"`
	Name         string    `json:"name"`
	Step         int64     `json:"step"`
	Participants []int     `json:"participants,omitempty"` // ranks that take part, ascending
	Ranks        []RankRun `json:"ranks"`                  // the ranks of the node that save
	Fingerprints []byte    `json:"fingerprints,omitempty"` // 32 bytes for each rank: planner.Fingerprint
	Digest       string    `json:"digest,omitempty"`       // of the fingerprints: BLAKE3-256, hexadecimal
}

// Each returns the plans of the ranks with these fingerprints, those of b or those that its
// digest stands for.
func (b NodePlan) Each(fingerprints []byte) iter.Seq[*LocalPlan] {
	return func(yield func(*LocalPlan) bool) {
		for i, rank := range RanksIn(b.Ranks) {
			sum := fingerprints[i*digestBytes:][:digestBytes]
			if !yield(&LocalPlan{
				Attempt: b.Attempt, Checkpoint: b.Checkpoint, Name: b.Name, Step: b.Step, Rank: rank,
				Participants: b.Participants, Fingerprint: hex.EncodeToString(sum),
			}) {
				return
			}
		}
	}
}

func (b NodePlan) check() error {
	n, err := checkRuns(b.Ranks)
	switch {
	case err != nil:
		return err
	case (len(b.Fingerprints) == 0) == (b.Digest == ""):
		return errors.New("want either fingerprints or their digest")
	case b.Digest == "" && len(b.Fingerprints) != n*digestBytes:
		return fmt.Errorf("the fingerprints of %d ranks have %d bytes", n, len(b.Fingerprints))
	}
	return nil
}

// JoinPlans returns the event that stands for plans of one save, whose ranks ascend. Each
// has a fingerprint only.
func JoinPlans(plans []*LocalPlan) (*NodePlan, error) {
	first, ranks := plans[0], make([]int, len(plans))
	b := &NodePlan{Attempt: first.Attempt, Checkpoint: first.Checkpoint, Name: first.Name, Step: first.Step, Participants: first.Participants}
	for i, p := range plans {
		if p.Name != first.Name || p.Step != first.Step || !slices.Equal(p.Participants, first.Participants) {
			return nil, fmt.Errorf("ranks %d and %d save %s differently", first.Rank, p.Rank, first.Checkpoint)
		}
		sum, err := hex.DecodeString(p.Fingerprint)
		if err != nil {
			return nil, err
		}
		ranks[i] = p.Rank
		b.Fingerprints = append(b.Fingerprints, sum...)
	}
	b.Ranks = RankRuns(ranks)
	return b, b.check()
}

// NodeSeal records that the bytes of ranks of one node are complete in their staging slots.
// It stands for a write.sealed of each rank.
type NodeSeal struct {
	Attempt    int       `json:"attempt"`
	Checkpoint string    `json:"checkpoint"`
	Ranks      []RankRun `json:"ranks"` // the ranks of the node that have sealed
	Bytes      []int64   `json:"bytes"` // of each rank, or one value for all

	Waited []float64 `json:"waited_s,omitempty"` // as in write.sealed, of each rank, or one value for all; -1 if unknown
	Copied []float64 `json:"copied_s,omitempty"` // as in write.sealed, of each rank, or one value for all; -1 if unknown
}

// Each returns the seals of the ranks.
func (b NodeSeal) Each() iter.Seq[*WriteSealed] {
	return func(yield func(*WriteSealed) bool) {
		for i, rank := range RanksIn(b.Ranks) {
			if !yield(&WriteSealed{
				Attempt: b.Attempt, Checkpoint: b.Checkpoint, Rank: rank, Bytes: at(b.Bytes, i),
				Waited: durationAt(b.Waited, i), Copied: durationAt(b.Copied, i),
			}) {
				return
			}
		}
	}
}

func (b NodeSeal) check() error {
	n, err := checkRuns(b.Ranks)
	return errors.Join(err, checkColumn("bytes", b.Bytes, n), checkDurations("waited_s", b.Waited, n), checkDurations("copied_s", b.Copied, n))
}

// JoinSeals returns the event that stands for seals of one save, whose ranks ascend.
func JoinSeals(seals []*WriteSealed) *NodeSeal {
	b := &NodeSeal{Attempt: seals[0].Attempt, Checkpoint: seals[0].Checkpoint}
	ranks, waited, copied := make([]int, len(seals)), make([]*float64, len(seals)), make([]*float64, len(seals))
	for i, s := range seals {
		ranks[i], waited[i], copied[i] = s.Rank, s.Waited, s.Copied
		b.Bytes = append(b.Bytes, s.Bytes)
	}
	b.Ranks, b.Bytes, b.Waited, b.Copied = RankRuns(ranks), column(b.Bytes), durations(waited), durations(copied)
	return b
}

// NodeFile is one file of each of several ranks.
type NodeFile struct {
	Name  string        `json:"name"`          // of a rank's file, with * in place of the rank's number in at least five digits
	Sizes []int64       `json:"sizes"`         // of each rank's file, or one value for all; -1 for a rank without this file
	From  CheckpointRef `json:"from,omitzero"` // as in write.completed
}

// NodeWrite records that the files of ranks of one node are durable. It stands for a
// write.completed of each rank.
type NodeWrite struct {
	Attempt      int        `json:"attempt"`
	Checkpoint   string     `json:"checkpoint"`
	Ranks        []RankRun  `json:"ranks"` // the ranks of the node whose files are durable
	Files        []NodeFile `json:"files"`
	Indexes      []byte     `json:"indexes"`       // 32 bytes for each rank: BLAKE3-256 of its index file
	BytesWritten []int64    `json:"bytes_written"` // of each rank, or one value for all
	BytesReused  []int64    `json:"bytes_reused"`  // of each rank, or one value for all

	Queued []float64 `json:"queued_s,omitempty"` // as in write.completed, of each rank, or one value for all; -1 if unknown
	Digest []float64 `json:"digest_s,omitempty"` // as in write.completed, of each rank, or one value for all; -1 if unknown
	Write  []float64 `json:"write_s,omitempty"`  // as in write.completed, of each rank, or one value for all; -1 if unknown
	Sync   []float64 `json:"sync_s,omitempty"`   // as in write.completed, of each rank, or one value for all; -1 if unknown
}

// Each returns the writes of the ranks.
func (b NodeWrite) Each() iter.Seq[*WriteCompleted] {
	return func(yield func(*WriteCompleted) bool) {
		for i, rank := range RanksIn(b.Ranks) {
			w := &WriteCompleted{
				Attempt: b.Attempt, Checkpoint: b.Checkpoint, Rank: rank,
				IndexDigest:  hex.EncodeToString(b.Indexes[i*digestBytes:][:digestBytes]),
				BytesWritten: at(b.BytesWritten, i), BytesReused: at(b.BytesReused, i),
				Queued: durationAt(b.Queued, i), Digest: durationAt(b.Digest, i), Write: durationAt(b.Write, i), Sync: durationAt(b.Sync, i),
			}
			for _, f := range b.Files {
				if size := at(f.Sizes, i); size >= 0 {
					w.Files = append(w.Files, File{Name: strings.Replace(f.Name, anyRank, rankNumber(rank), 1), Size: size, From: f.From})
				}
			}
			if !yield(w) {
				return
			}
		}
	}
}

func (b NodeWrite) check() error {
	n, err := checkRuns(b.Ranks)
	if err == nil && len(b.Indexes) != n*digestBytes {
		err = fmt.Errorf("the index digests of %d ranks have %d bytes", n, len(b.Indexes))
	}
	for _, f := range b.Files {
		err = errors.Join(err, checkColumn("sizes", f.Sizes, n))
	}
	return errors.Join(err, checkColumn("bytes_written", b.BytesWritten, n), checkColumn("bytes_reused", b.BytesReused, n),
		checkDurations("queued_s", b.Queued, n), checkDurations("digest_s", b.Digest, n), checkDurations("write_s", b.Write, n), checkDurations("sync_s", b.Sync, n))
}

// anyRank stands for the number of a rank in the name of a file.
const anyRank = "*"

func rankNumber(rank int) string { return fmt.Sprintf("%05d", rank) }

// JoinWrites returns the events that stand for writes of one save, whose ranks ascend: one
// of the node, and the writes that it cannot hold.
func JoinWrites(writes []*WriteCompleted) (out []Body) {
	b := &NodeWrite{Attempt: writes[0].Attempt, Checkpoint: writes[0].Checkpoint}
	var ranks []int
	var queued, digest, write, sync []*float64
	type place struct {
		name string
		from CheckpointRef
	}
	places := map[place]int{} // indexes of files
	for _, w := range writes {
		index, err := hex.DecodeString(w.IndexDigest)
		odd := func(f File) bool { return f.Size < 0 || strings.Contains(f.Name, anyRank) }
		if err != nil || len(index) != digestBytes || slices.ContainsFunc(w.Files, odd) {
			out = append(out, w)
			continue
		}
		b.Indexes = append(b.Indexes, index...)
		b.BytesWritten, b.BytesReused = append(b.BytesWritten, w.BytesWritten), append(b.BytesReused, w.BytesReused)
		for _, f := range w.Files {
			file := place{strings.Replace(f.Name, rankNumber(w.Rank), anyRank, 1), f.From}
			at, known := places[file]
			if !known {
				at = len(b.Files)
				places[file], b.Files = at, append(b.Files, NodeFile{Name: file.name, From: file.from})
			}
			b.Files[at].Sizes = append(absent(b.Files[at].Sizes, len(ranks)), f.Size)
		}
		ranks = append(ranks, w.Rank)
		queued, digest, write, sync = append(queued, w.Queued), append(digest, w.Digest), append(write, w.Write), append(sync, w.Sync)
	}
	if len(ranks) == 0 {
		return out
	}
	for i := range b.Files {
		b.Files[i].Sizes = column(absent(b.Files[i].Sizes, len(ranks)))
	}
	b.Ranks, b.BytesWritten, b.BytesReused = RankRuns(ranks), column(b.BytesWritten), column(b.BytesReused)
	b.Queued, b.Digest, b.Write, b.Sync = durations(queued), durations(digest), durations(write), durations(sync)
	if b.check() != nil { // such as a rank that lists a file twice
		out = nil
		for _, w := range writes {
			out = append(out, w)
		}
		return out
	}
	return append([]Body{b}, out...)
}

// absent fills a column of sizes up to a length.
func absent(sizes []int64, n int) []int64 {
	for len(sizes) < n {
		sizes = append(sizes, -1)
	}
	return sizes
}

// NodeRun places consecutive ranks on nodes with consecutive numbers, the same number of
// ranks on each.
type NodeRun struct {
	Node  int `json:"node"`  // number of the first node in the job
	Nodes int `json:"nodes"` // number of nodes, at least 1
	First int `json:"first"` // lowest rank of the first node
	Count int `json:"count"` // ranks of each node, at least 1
}

// NodeRuns returns the runs of a group whose ranks are placed in order: nodes lists the
// numbers of the nodes, and counts the ranks of each.
func NodeRuns(nodes, counts []int) (runs []NodeRun) {
	rank := 0
	for i, count := range counts {
		switch n := len(runs); {
		case count == 0:
		case n > 0 && runs[n-1].Count == count && runs[n-1].Node+runs[n-1].Nodes == nodes[i]:
			runs[n-1].Nodes++
		default:
			runs = append(runs, NodeRun{Node: nodes[i], Nodes: 1, First: rank, Count: count})
		}
		rank += count
	}
	return runs
}

// checkNodeRuns returns an error unless runs place all ranks of a world, each once.
func checkNodeRuns(runs []NodeRun, world int) error {
	rank := 0
	for _, run := range runs {
		if run.Node < 0 || run.Node > maxRank || run.First != rank || run.Nodes < 1 || run.Count < 1 || run.Nodes > (world-rank)/run.Count {
			return fmt.Errorf("%d nodes from %d on with %d ranks each cannot follow at rank %d of %d", run.Nodes, run.Node, run.Count, run.First, world)
		}
		rank += run.Nodes * run.Count
	}
	if rank != world || world > maxRank {
		return fmt.Errorf("%d of %d ranks have a place", rank, world)
	}
	return nil
}

// Placed returns the placement of each rank, from [GroupStarted.Ranks] or its nodes.
func (b GroupStarted) Placed() iter.Seq[RankPlacement] {
	return func(yield func(RankPlacement) bool) {
		for _, p := range b.Ranks {
			if !yield(p) {
				return
			}
		}
		for _, run := range b.Nodes {
			for i := range run.Nodes * run.Count {
				if !yield(RankPlacement{Rank: run.First + i, Node: run.Node + i/run.Count, LocalRank: i % run.Count}) {
					return
				}
			}
		}
	}
}

// schemaVersion returns 2 for a group whose ranks are placed by node: a reader of version 1
// would find no ranks.
func (b GroupStarted) schemaVersion() int {
	if len(b.Nodes) > 0 {
		return 2
	}
	return 1
}

func (b GroupStarted) check() error {
	if len(b.Nodes) == 0 {
		return nil
	}
	if len(b.Ranks) > 0 {
		return errors.New("ranks are placed twice, by rank and by node")
	}
	return checkNodeRuns(b.Nodes, b.WorldSize)
}

// NodeMap names the nodes of a group, one value for each, in the order of their places.
type NodeMap struct {
	Index   []int    `json:"index"`   // number in the run
	Key     []string `json:"key"`     // identity, the same over restarts of the node's trainer
	Host    []string `json:"host"`    // its name
	Address []string `json:"address"` // numeric
}

// NodeDevices records the devices of ranks of one node, in a group whose ranks are placed by
// node.
type NodeDevices struct {
	Attempt int        `json:"attempt"`
	Ranks   []RankRun  `json:"ranks"`   // the ranks of the node
	Devices [][]string `json:"devices"` // of each rank: UUIDs of its GPUs
}

func (b NodeDevices) check() error {
	n, err := checkRuns(b.Ranks)
	if err == nil && len(b.Devices) != n {
		err = fmt.Errorf("%d lists of devices for %d ranks", len(b.Devices), n)
	}
	return err
}

// ReplicaNode records that another node has a whole copy, in its memory, of the sealed slots of
// a node's ranks. The save survives the loss of that node: the other one writes them.
type ReplicaNode struct {
	Attempt    int       `json:"attempt"`
	Checkpoint string    `json:"checkpoint"`
	Ranks      []RankRun `json:"ranks"` // whose slots were copied
	Node       int       `json:"node"`  // index of the node that has the copy
	Bytes      int64     `json:"bytes"`
	Seconds    float64   `json:"seconds"` // since the first of the slots was sealed
}

func (b ReplicaNode) check() error {
	_, err := checkRuns(b.Ranks)
	return err
}

// Kind implements [Body] for each type.
func (NodeDevices) Kind() Kind { return "group.node_devices" }
func (NodePlan) Kind() Kind    { return "plan.node" }
func (NodeSeal) Kind() Kind    { return "seal.node" }
func (NodeWrite) Kind() Kind   { return "write.node" }
func (ReplicaNode) Kind() Kind { return "replica.node" }
