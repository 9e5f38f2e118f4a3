package restore

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/problem/system"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/tensor"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// The saved state: a tensor whose rows three ranks have saved, a tensor and a value.
const (
	rows    = 12
	columns = 50_000
	savedBy = 3
	saved   = "step-5.a1"
)

func content(fqn string, n int64) []byte {
	out := make([]byte, n)
	for i := range out {
		out[i] = byte(i*7 + len(fqn) + i/251)
	}
	return out
}

var (
	weight = tensor.Shard{FQN: "weight", DType: tensor.Uint8, Global: tensor.Shape{rows, columns}}
	bias   = tensor.Shard{FQN: "bias", DType: tensor.Uint8, Global: tensor.Shape{200_000}, Box: tensor.Shape{200_000}.Full()}
)

const configBytes = 100

// rowsOf is the part of weight of one of world ranks.
func rowsOf(rank, world int) tensor.Shard {
	s, share := weight, int64(rows/world)
	s.Box = tensor.Box{Offsets: []int64{int64(rank) * share, 0}, Sizes: []int64{share, columns}}
	return s
}

// saving saves the state in a directory of a store.
func saving(t *testing.T) (root *data.Root, row projections.Checkpoint) {
	t.Helper()
	root, err := data.OpenUnsynced(filepath.Join(t.TempDir(), "data"))
	if err != nil {
		t.Fatal(err)
	}
	root.OfStore("store-1")
	layout := checkpoint.Layout{
		Tensors: []checkpoint.Tensor{
			{FQN: "bias", DType: tensor.Uint8, Shape: bias.Global, Chunks: []checkpoint.Chunk{{Box: bias.Box}}},
			{FQN: "weight", DType: tensor.Uint8, Shape: weight.Global},
		},
		Values: []checkpoint.Value{{FQN: "config", Rank: 1, Bytes: configBytes}},
	}
	for rank := range savedBy {
		layout.Tensors[1].Chunks = append(layout.Tensors[1].Chunks, checkpoint.Chunk{Rank: rank, Box: rowsOf(rank, savedBy).Box})
	}
	m := checkpoint.Manifest{
		Store: "store-1", Run: "run", Trial: "main", Checkpoint: saved, Name: "step-5", Step: 5, Attempt: 1, WorldSize: savedBy, Layout: layout,
	}
	w := root.Writer(checkpoint.RefOf("run", "main", saved))
	if err := w.SetUp(t.Context(), true); err != nil {
		t.Fatal(err)
	}
	for rank := range savedBy {
		items := layout.Items(rank)
		wrote, err := w.WriteData(t.Context(), rank, items, itemSource(items))
		if err != nil {
			t.Fatal(err)
		}
		m.Ranks = append(m.Ranks, checkpoint.RankIndex{Rank: rank, Index: wrote.Index})
	}
	digest := checkpoint.Digest{}
	if _, err := w.Finish(t.Context(), m, func(_ context.Context, d checkpoint.Digest) (checkpoint.Decision, error) {
		digest = d
		return checkpoint.Decision{Sequence: 1, Event: "e", Time: time.Unix(0, 0).UTC()}, nil
	}); err != nil {
		t.Fatal(err)
	}
	return root, projections.Checkpoint{ID: saved, Run: "run", Trial: "main", Step: 5, Manifest: digest.String()}
}

type itemSource []checkpoint.Item

func (s itemSource) Item(i int) ([]byte, error) {
	it := s[i]
	if it.Value {
		return content(it.Shard.FQN, it.Bytes), nil
	}
	return bytesOf(it.Shard), nil
}

// bytesOf returns the bytes of whole rows.
func bytesOf(s tensor.Shard) []byte {
	all, row := content(s.FQN, s.Global.Volume()), s.Global.Volume()/s.Global[0]
	return all[s.Box.Offsets[0]*row:][:s.Box.Volume()]
}

func itemOfShard(s tensor.Shard) client.Item {
	return client.Item{FQN: s.FQN, DType: s.DType, Shape: s.Global, Offsets: s.Box.Offsets, Sizes: s.Box.Sizes}
}

var configItem = client.Item{FQN: "config", Value: true}

// whole is what a rank of four asks for: its rows, and the rest.
func whole(rank int) client.LoadRequest {
	return client.LoadRequest{Ref: "step-5", Strict: true, Items: []client.Item{itemOfShard(rowsOf(rank, 4)), itemOfShard(bias), configItem}}
}

// eventLog keeps the events of loads.
type eventLog struct {
	mu        sync.Mutex
	begun     []events.RestoreBegun
	plans     []events.LoadPlan
	completed []events.RestoreCompleted
	failed    []events.RestoreFailed
	refuses   error // of the next completion
}

func (l *eventLog) Begun(_ context.Context, b *events.RestoreBegun) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.begun = append(l.begun, *b)
	return nil
}

func (l *eventLog) Failed(_ context.Context, b *events.RestoreFailed) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.failed = append(l.failed, *b)
	return nil
}

func (l *eventLog) Completed(_ context.Context, plans []*events.LoadPlan, b *events.RestoreCompleted) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err := l.refuses; err != nil {
		return err
	}
	for _, p := range plans {
		l.plans = append(l.plans, *p)
	}
	l.completed = append(l.completed, *b)
	return nil
}

// counts returns how many events of loads there are: begun, completed, failed.
func (l *eventLog) counts() [3]int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return [3]int{len(l.begun), len(l.completed), len(l.failed)}
}

// failure returns the text of the only failed load.
func (l *eventLog) failure(t *testing.T) string {
	t.Helper()
	if got := l.counts(); got[1] != 0 || got[2] != 1 {
		t.Fatalf("the log has %v loads that began, completed and failed", got)
	}
	return l.failed[0].Error
}

// wire is the way of a node to the meeting: requests and replies as JSON.
type wire struct {
	m    *Meeting
	node int
	lost bool   // the first answer to each request is lost
	done func() // called before the outcome is sent; may be nil
}

var _ Coordinator = (*wire)(nil)

func overJSON[T any](in T) (out T) {
	text, err := json.Marshal(in)
	if err == nil {
		err = json.Unmarshal(text, &out)
	}
	if err != nil {
		panic(err)
	}
	return out
}

func call[In, Out any](ctx context.Context, w *wire, in In, do func(context.Context, int, In) (Out, error)) (Out, error) {
	if w.lost {
		cut, cancel := context.WithCancel(ctx)
		cancel()
		_, _ = do(cut, w.node, overJSON(in)) // an answer is possible
		if _, err := do(ctx, w.node, overJSON(in)); err != nil {
			return *new(Out), err
		}
	}
	out, err := do(ctx, w.node, overJSON(in))
	return overJSON(out), err
}

func (w *wire) Resolve(ctx context.Context, req ResolveRequest) (ResolveReply, error) {
	return call(ctx, w, req, w.m.Resolve)
}

func (w *wire) Share(ctx context.Context, req ShareRequest) (ShareReply, error) {
	return call(ctx, w, req, w.m.Share)
}

func (w *wire) Done(ctx context.Context, req DoneRequest) (DoneReply, error) {
	if w.done != nil {
		w.done()
	}
	return call(ctx, w, req, w.m.Done)
}

const limit = time.Minute

// group is a group of four ranks on two nodes.
type group struct {
	log     *eventLog
	root    *data.Root
	meeting *Meeting
	wire    *wire // of node 1
	loaders [2]*Loader
}

func newGroup(t *testing.T, change ...func(*Config)) *group {
	t.Helper()
	root, row := saving(t)
	g := &group{log: &eventLog{}, root: root}
	cfg := Config{
		Run: "run", Trial: "main", Attempt: 2, World: 4, Log: g.log, Logger: slog.New(slog.DiscardHandler), Work: t.Context(),
		Kind: system.KindOf, Spare: func() bool { return false },
		Store: Store{
			Data: root, Reader: func(own *data.FileReader) data.Reader { return own },
			Resolve: func(_ context.Context, ref string) (projections.Checkpoint, error) {
				if ref != "run@step-5" {
					return projections.Checkpoint{}, problem.Errorf(problem.NotFound, "no checkpoint %s", ref)
				}
				return row, nil
			},
		},
	}
	for _, c := range change {
		c(&cfg)
	}
	g.meeting = NewMeeting(cfg, [][]int{{0, 1}, {2, 3}}, limit)
	g.wire = &wire{m: g.meeting, node: 1}
	for node, to := range []Coordinator{g.meeting.Local(0), g.wire} {
		arenas, err := staging.Open(t.TempDir(), "01990000-0000-7000-8000-00000000000a", "run", node, nil, cfg.Logger)
		if err != nil {
			t.Fatal(err)
		}
		own := cfg
		own.Arenas, own.Coordinator, own.Local = arenas, to, []int{2 * node, 2*node + 1}
		if node > 0 { // it can neither resolve a reference nor write to the log
			own.Store.Resolve, own.Log = nil, nil
		}
		g.loaders[node] = New(own)
		t.Cleanup(func() {
			if err := arenas.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	t.Cleanup(func() {
		if !g.meeting.Close(limit) || !g.loaders[0].Close(limit) || !g.loaders[1].Close(limit) {
			t.Error("loads do not end")
		}
	})
	return g
}

// result is what a rank gets.
type result struct {
	reply client.LoadReply
	err   error
}

// start makes ranks load, and returns the result of each.
func (g *group) start(t *testing.T, participants, ranks []int, req func(rank int) client.LoadRequest) func() map[int]result {
	var mu sync.Mutex
	var wg sync.WaitGroup
	got := map[int]result{}
	for _, rank := range ranks {
		wg.Go(func() {
			var r result
			r.reply, r.err = g.loaders[rank/2].Load(t.Context(), rank, participants, req(rank), limit)
			mu.Lock()
			defer mu.Unlock()
			got[rank] = r
		})
	}
	return func() map[int]result {
		wg.Wait()
		return got
	}
}

var all = []int{0, 1, 2, 3}

func (g *group) load(t *testing.T, participants []int, req func(rank int) client.LoadRequest) map[int]result {
	return g.start(t, participants, participants, req)()
}

// intact checks that ranks got the saved bytes, and gives the memory back.
func (g *group) intact(t *testing.T, got map[int]result, req func(rank int) client.LoadRequest) {
	t.Helper()
	var wg sync.WaitGroup
	for rank, r := range got {
		if r.err != nil {
			t.Fatalf("rank %d: %v", rank, r.err)
		}
		for i, it := range req(rank).Items {
			file, err := os.ReadFile(r.reply.Arenas[r.reply.In[i]].Path)
			if err != nil {
				t.Fatal(err)
			}
			want := content("config", configBytes)
			if !it.Value {
				want = bytesOf(it.Shard())
			}
			if !bytes.Equal(file[r.reply.Offsets[i]:][:r.reply.Sizes[i]], want) {
				t.Errorf("rank %d got other bytes of %s", rank, it.FQN)
			}
		}
		wg.Go(func() {
			if err := g.loaders[rank/2].Loaded(t.Context(), rank, client.LoadedRequest{Load: r.reply.Load}, limit); err != nil {
				t.Errorf("rank %d: %v", rank, err)
			}
		})
	}
	wg.Wait()
}

// fails checks that ranks got errors of a kind that contain texts.
func fails(t *testing.T, got map[int]result, ranks []int, kind problem.Kind, texts ...string) {
	t.Helper()
	for _, rank := range ranks {
		err := got[rank].err
		if err == nil {
			t.Errorf("rank %d got a checkpoint", rank)
			continue
		}
		if has := system.KindOf(err); has != kind {
			t.Errorf("rank %d got an error of kind %s, want %s: %v", rank, has, kind, err)
		}
		for _, text := range texts {
			if !bytes.Contains([]byte(err.Error()), []byte(text)) {
				t.Errorf("rank %d got %q, want %q in it", rank, err, text)
			}
		}
	}
}

// damage changes a byte of a rank's data file, in its last block.
func (g *group) damage(t *testing.T, rank int) {
	t.Helper()
	names, err := filepath.Glob(filepath.Join(g.root.Dir(), "run", "main", saved, fmt.Sprintf("*%d*.safetensors", rank)))
	if err != nil || len(names) != 1 {
		t.Fatal(names, err)
	}
	f, err := os.OpenFile(names[0], os.O_RDWR, 0)
	if err != nil {
		t.Fatal(err)
	}
	info, err := f.Stat()
	if err == nil {
		_, err = f.WriteAt([]byte{0xEE, 0xEE, 0xEE}, info.Size()-1000)
	}
	if err := errors.Join(err, f.Close()); err != nil {
		t.Fatal(err)
	}
}

// ranksOf returns the ranks of plans.
func ranksOf(plans []events.LoadPlan) (ranks []int) {
	for _, p := range plans {
		ranks = append(ranks, p.Rank)
	}
	return slices.Clip(ranks)
}
