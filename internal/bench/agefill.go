package bench

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/planner"
	"github.com/ckptstore/ckptstore/projections"
	"github.com/ckptstore/ckptstore/tensor"
)

// agedStore is a store with a history, as trainers would have left it. The functions
// that trainers use write its events, data directories, receipts, manifests and
// indexes. Only syncs are left out, so that it takes minutes:
//
//	DIR/age-<checkpoints>-<events>-<runs>[-spike-<iteration>]/
//	  store/       the store
//	  aged.json    written last: how it was made
type agedStore struct {
	Checkpoints int     `json:"checkpoints"`
	Events      uint64  `json:"events"`
	Runs        int     `json:"runs"`
	Seconds     float64 `json:"generation_seconds"`

	dir   string // of the store
	spike int    // iteration; 0: none
}

const agedName = "aged.json"

// agedRuns is the number of runs generated in parallel: their appends share batches.
const agedRuns = 24

// The number of events of a save by one rank, and of a run without its saves and
// reports.
const eventsOfSave, eventsOfRun = 7, 8

// makeAged generates a store, or finds one of the same size.
func makeAged(ctx context.Context, dir string, checkpoints, count, runs, spike int, progress func(done int)) (agedStore, error) {
	place := filepath.Join(dir, fmt.Sprintf("age-%d-%d-%d", checkpoints, count, runs))
	if spike > 0 {
		place += fmt.Sprintf("-spike-%d", spike)
	}
	a := agedStore{Checkpoints: checkpoints, Runs: runs, dir: filepath.Join(place, "store"), spike: spike}
	text, err := os.ReadFile(filepath.Join(place, agedName))
	if err == nil {
		return a, json.Unmarshal(text, &a)
	}
	if !errors.Is(err, os.ErrNotExist) {
		return a, err
	}
	if err := errors.Join(os.RemoveAll(place), os.MkdirAll(place, 0o700)); err != nil {
		return a, err
	}
	begin := time.Now()
	id, err := store.Init(ctx, a.dir, "")
	if err != nil {
		return a, err
	}
	if err := a.fill(ctx, id, count, progress); err != nil {
		return a, err
	}
	a.Seconds = time.Since(begin).Seconds()
	if text, err = json.Marshal(a); err != nil {
		return a, err
	}
	return a, os.WriteFile(filepath.Join(place, agedName), append(text, '\n'), 0o600)
}

func (a *agedStore) fill(ctx context.Context, id string, count int, progress func(done int)) error {
	// A cancelled start would continue to write to the directory.
	server, err := jetlog.StartServer(context.WithoutCancel(ctx), jetlog.ServerOptions{Dir: filepath.Join(a.dir, "log"), Unsynced: true})
	if err != nil {
		return err
	}
	defer server.Shutdown()
	log, err := jetlog.Connect(ctx, jetlog.Options{Dial: func(context.Context) (net.Conn, error) { return server.Dial() }})
	if err != nil {
		return err
	}
	defer log.Close()
	if _, _, err := log.Open(ctx); err != nil {
		return err
	}
	data, err := data.OpenUnsynced(filepath.Join(a.dir, "data"))
	if err != nil {
		return err
	}
	data.OfStore(id)
	var done atomic.Int64
	group, life := errgroup.WithContext(ctx)
	group.SetLimit(agedRuns)
	for n := range a.Runs {
		r := agedRun{
			log: log, data: data, store: id, name: runName(n),
			// The first runs take the remainder of the division.
			saves: portion(a.Checkpoints, a.Runs, n), events: portion(count, a.Runs, n),
			saved: func() { progress(int(done.Add(1))) }, spike: a.spike,
		}
		group.Go(func() error { return r.make(life) })
	}
	if err := group.Wait(); err != nil {
		return fmt.Errorf("generate a store in %s: %w", a.dir, err)
	}
	a.Events, err = log.Last(ctx)
	return err
}

func runName(n int) string { return fmt.Sprintf("run-%04d", n) }

// portion returns the n-th of parts equal parts of whole.
func portion(whole, parts, n int) int { return whole*(n+1)/parts - whole*n/parts }

// agedRun is one run: a job with one attempt of one rank.
type agedRun struct {
	log           *jetlog.Log
	data          *data.Root
	store, name   string
	saves, events int
	saved         func()
	spike         int // iteration; 0: none

	lane      uint64
	iteration int
}

// agedContent is the content of a checkpoint of the run: a tensor.
type agedContent struct{ data []byte }

func (c agedContent) Item(int) ([]byte, error) { return c.data, nil }

const agedTensor = 64 // bytes

func (r *agedRun) decide(ctx context.Context, body events.Body) (checkpoint.Decision, error) {
	d, err := events.NewDecision(store.Stamp("bench"), events.Aggregate{Run: r.name, Trial: projections.DefaultTrial}, body)
	if err != nil {
		return checkpoint.Decision{}, err
	}
	if r.lane, err = r.log.Decide(ctx, d, r.lane); err != nil {
		return checkpoint.Decision{}, err
	}
	return checkpoint.Decision{Sequence: r.lane, Event: d.ID, Time: d.Time}, nil
}

func (r *agedRun) say(ctx context.Context, actor events.Actor, bodies ...events.Body) error {
	facts := make([]events.Fact, len(bodies))
	for i, b := range bodies {
		var err error
		facts[i], err = events.NewFact(store.Stamp("bench"), events.Scope{Run: r.name, Trial: projections.DefaultTrial, Actor: actor}, b)
		if err != nil {
			return err
		}
	}
	_, err := r.log.Append(ctx, facts...)
	return err
}

func (r *agedRun) make(ctx context.Context) error {
	job := store.NewID()
	if err := r.say(ctx, events.Node(0), &events.JobStarted{Job: job, Host: "bench", PID: 1, Command: []string{"python", "train.py"}, NProc: 1, NNodes: 1, Resume: "auto"}); err != nil {
		return err
	}
	for _, body := range []events.Body{
		&events.TrialCreated{Config: map[string]any{"lr": 0.001}},
		&events.GroupStarted{Attempt: 1, Job: job, WorldSize: 1, Ranks: []events.RankPlacement{{}}, Backend: "cpu"},
	} {
		if _, err := r.decide(ctx, body); err != nil {
			return err
		}
	}
	if err := r.say(ctx, events.Node(0), &events.TrainingStarted{Attempt: 1}); err != nil {
		return err
	}
	for n := range r.saves {
		reports := portion(max(0, r.events-eventsOfRun-r.saves*eventsOfSave), r.saves, n)
		if err := r.save(ctx, n, reports); err != nil {
			return err
		}
		r.saved()
	}
	if err := r.say(ctx, events.Node(0), &events.WorkerExited{Attempt: 1}, &events.GroupStopped{Attempt: 1, Reason: "all ranks ended well"}); err != nil {
		return err
	}
	if _, err := r.decide(ctx, &events.TrialCompleted{Attempt: 1}); err != nil {
		return err
	}
	return r.say(ctx, events.Node(0), &events.JobEnded{Job: job})
}

// save reports and then saves.
func (r *agedRun) save(ctx context.Context, n, reports int) error {
	said := make([]events.Body, 0, reports+1)
	for range reports {
		r.iteration++
		var loss any = 1 / float64(r.iteration)
		switch {
		case r.spike == 0:
		case r.iteration == r.spike:
			loss = 1000.0
		case r.iteration == r.spike+1:
			loss = "NaN"
		}
		said = append(said, &events.Metrics{
			Attempt: 1, Iteration: r.iteration, Step: int64(r.iteration), Seconds: 0.25,
			Metrics: map[string]any{"loss": loss, "lr": 0.001, "grad_norm": 1.5},
		})
	}
	layout := checkpoint.Layout{Tensors: []checkpoint.Tensor{{
		FQN: "model.weight", DType: tensor.Uint8, Shape: tensor.Shape{agedTensor},
		Chunks: []checkpoint.Chunk{{Rank: 0, Box: tensor.Shape{agedTensor}.Full()}},
	}}}
	items := layout.Items(0)
	step := int64(max(r.iteration, n+1))
	name := fmt.Sprintf("step-%d", step)
	id := name + ".a1"
	local := checkpoint.Local{Items: items}
	full := &events.LocalPlan{
		Attempt: 1, Checkpoint: id, Name: name, Step: step, Participants: []int{0},
		Fingerprint: planner.Fingerprint(local, 1, []int{0}).String(),
	}
	if n == 0 {
		full.Plan = events.InlineBlob(checkpoint.EncodeLocal(local))
	}
	if err := r.say(ctx, events.Rank(0), append(said, full)...); err != nil {
		return err
	}
	if _, err := r.decide(ctx, &events.CheckpointBegun{Attempt: 1, Checkpoint: id, Name: name, Step: step, WorldSize: 1, Participants: []int{0}}); err != nil {
		return err
	}
	w := r.data.Writer(checkpoint.RefOf(r.name, projections.DefaultTrial, id))
	if err := w.SetUp(ctx, true); err != nil {
		return err
	}
	content := make([]byte, agedTensor)
	copy(content, fmt.Sprintf("%s of %s", id, r.name))
	got, err := w.WriteData(ctx, 0, items, agedContent{content})
	if err != nil {
		return err
	}
	done := &events.WriteCompleted{Attempt: 1, Checkpoint: id, IndexDigest: got.Index.String(), BytesWritten: got.BytesWritten}
	for _, f := range got.Files {
		done.Files = append(done.Files, events.File{Name: f.Name, Size: f.Size})
	}
	if err := r.say(ctx, events.Node(0),
		&events.GlobalPlan{Attempt: 1, Checkpoint: id, Layout: events.InlineBlob(checkpoint.EncodeLayout(layout))},
		&events.WriteSealed{Attempt: 1, Checkpoint: id, Bytes: agedTensor}); err != nil {
		return err
	}
	if _, err := r.decide(ctx, &events.CheckpointStaged{Attempt: 1, Checkpoint: id}); err != nil {
		return err
	}
	if err := r.say(ctx, events.Node(0), done); err != nil {
		return err
	}
	_, err = w.Finish(ctx, checkpoint.Manifest{
		Store: r.store, Run: r.name, Trial: projections.DefaultTrial, Checkpoint: id, Name: name, Step: step, Attempt: 1, WorldSize: 1,
		Ranks: []checkpoint.RankIndex{{Rank: 0, Index: got.Index}}, Layout: layout,
	}, func(ctx context.Context, manifest checkpoint.Digest) (checkpoint.Decision, error) {
		return r.decide(ctx, &events.CheckpointCommitted{Attempt: 1, Checkpoint: id, Manifest: manifest.String(), Bytes: agedTensor})
	})
	return err
}
