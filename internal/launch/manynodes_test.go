package launch_test

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"math"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/ckptstore/ckptstore/client"
	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/collective"
	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/launch/blame"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/projections"
)

// follower is another node of a job, in this process: it has its own shared memory and
// its own workers.
type follower struct {
	out, log *transcript
	memory   string // its shared memory
	link     *nodes.Link
	reads    atomic.Int32 // of the trial's log
	done     chan error
	stop     context.CancelFunc
}

// spread makes a job run on several nodes with so many workers each. The first
// coordinates.
func (j *job) spread(procs ...int) (others []*follower) {
	t := j.t
	t.Helper()
	j.coordinate(procs...)
	for index := 1; index < len(procs); index++ {
		others = append(others, j.follow(index, procs[index]))
	}
	return others
}

// follow starts another node of the job.
func (j *job) follow(index, procs int) *follower {
	t := j.t
	t.Helper()
	endpoint := j.cfg.Endpoint
	f := &follower{out: newTranscript(), log: newTranscript(), done: make(chan error, 1)}
	port, err := launch.HoldPort()
	if err != nil {
		t.Fatal(err)
	}
	contact := &process.Contact{}
	cfg := config(j.cfg.Run, procs, j.cfg.Command, f.out, f.log)
	cfg.Job, cfg.Contact, cfg.Port = j.cfg.Job, contact, port
	cfg.Logger = slog.New(slog.NewTextHandler(f.log, nil))
	memory, err := os.MkdirTemp("/dev/shm", "ckptstore-test-")
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	f.stop, f.memory = stop, memory
	own := storeOf(home, memory)
	own.Log = unreadLog{own.Log, &f.reads}
	if j.differs != nil {
		j.differs(index, &cfg, &own)
	}
	f.link = j.join(index, cfg, contact)
	go func() { f.done <- launch.Follow(ctx, cfg, own, f.link) }()
	t.Cleanup(func() {
		_ = endpoint.Close() // tells the node
		stop()
		err := <-f.done
		f.link.Close()
		_ = os.RemoveAll(memory)
		if t.Failed() {
			t.Logf("node %d ended: %v; its workers:\n%strainer:\n%s", index, err, f.out, f.log)
		}
	})
	return f
}

// coordinate makes the job's process the coordinating one of nodes with so many workers.
func (j *job) coordinate(procs ...int) {
	j.t.Helper()
	j.shared = j.t.TempDir()
	j.cfg.Nodes = session.OneNode(procs[0])
	if j.differs != nil {
		j.differs(0, &j.cfg, &j.store)
	}
	self := nodes.Node{Index: 0, Key: "0", Procs: procs[0]}
	j.cfg.Peers.Declare(&self)
	self.Keeps = j.cfg.Replicas > 0
	endpoint, err := nodes.Listen(j.t.Context(), nodes.EndpointConfig{
		Address: "127.0.0.1:0", Dir: j.shared, Job: j.cfg.Job, Run: j.cfg.Run, Store: home.ID, Version: "test", Min: len(procs), Max: len(procs),
		Self: self, Timeout: patience / 6, Logger: j.cfg.Logger,
	})
	if err != nil {
		j.t.Fatal(err)
	}
	j.t.Cleanup(func() { _ = endpoint.Close() })
	j.cfg.Endpoint, j.cfg.GatherTimeout, j.cfg.LastCall = endpoint, patience, patience
}

// join joins the job as a node.
func (j *job) join(index int, cfg launch.Config, contact *process.Contact) *nodes.Link {
	j.t.Helper()
	self := nodes.Node{Index: index, Key: fmt.Sprint(index), Procs: len(cfg.Local()), Port: cfg.Port.Port(), Version: "test", Store: home.ID}
	cfg.Peers.Declare(&self)
	self.Keeps = cfg.Replicas > 0
	answered := func(sent time.Time, timeout time.Duration) {
		if j.unheard == nil || !j.unheard(contact) {
			contact.Answered(sent, timeout)
		}
		if j.beaten != nil {
			j.beaten()
		}
	}
	link, err := nodes.Join(j.t.Context(), nodes.JoinConfig{
		Address: j.cfg.Endpoint.Addr().String(), Dir: j.shared, Wait: patience, Answered: answered,
		Self: self,
	})
	if err != nil {
		j.t.Fatal(err)
	}
	return link
}

// beatsOnly makes the job one of two nodes. The other beats, and obeys nothing.
func (j *job) beatsOnly() *nodes.Link {
	j.t.Helper()
	j.coordinate(1, 1)
	port, err := launch.HoldPort()
	if err != nil {
		j.t.Fatal(err)
	}
	cfg := config(j.cfg.Run, 1, j.cfg.Command, j.out, j.log)
	cfg.Port = port
	link := j.join(1, cfg, &process.Contact{})
	j.t.Cleanup(link.Close)
	if err := link.Tell("serves", struct{}{}); err != nil {
		j.t.Fatal(err)
	}
	return link
}

// unreadLog counts the readings of trials.
type unreadLog struct {
	session.Log
	reads *atomic.Int32
}

// ReadTrial implements session.Log.
func (l unreadLog) ReadTrial(ctx context.Context, of events.Aggregate, from, until uint64) iter.Seq2[events.Recorded, error] {
	l.reads.Add(1)
	return l.Log.ReadTrial(ctx, of, from, until)
}

// What ranks of one node do together, ranks of several nodes do too. The process of a node
// that does not coordinate never reads the log of the trial.
func TestRanksOfSeveralNodes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name  string
		ranks int
		does  []string
	}{
		{"collectives", 3, collects},
		{"saves", 3, savesThree},
		{"loads in parts", 3, loadsInParts},
		{"a rank that cannot load", 2, cannotLoad},
		{"a load around a commit", 2, loadsAroundCommit},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			j := newJob(t, c.ranks, c.does...)
			other := j.spread(c.ranks-1, 1)[0]
			j.must()
			if n := other.reads.Load(); n > 0 {
				t.Errorf("node 1 has read the log of the trial %d times", n)
			}
		})
	}
}

// savesAfterMisfit makes a save whose plans do not fit together, and then a good one. The plan
// of rank 1 is the same in both. Rank 0 saves after rank 1 has: otherwise the abort may come
// before the reply from which rank 1 learns that its plan is known.
var savesAfterMisfit = workerRole("saves after plans that do not fit", func(ctx context.Context, c *client.Client) error {
	meet := func() error {
		_, err := collective.New(c.Collectives(), collective.Options{}).AllGatherBytes(ctx, nil)
		return err
	}
	if c.Rank == 0 {
		if err := meet(); err != nil {
			return err
		}
	}
	s, err := c.Save(ctx, 1, state(1, c.Rank, 4-2*c.Rank), client.SaveOptions{})
	if err == nil && c.Rank == 1 {
		err = meet()
	}
	if err == nil {
		err = s.Wait(ctx, client.Committed)
	}
	if err == nil || !strings.Contains(err.Error(), "do not fit together") {
		return fmt.Errorf("plans that do not fit: %w", err)
	}
	return save(ctx, c, 2)
})

// A plan of another node that was in the log with an aborted save only is unknown by its
// fingerprint: its node is asked for it.
func TestUnknownPlanOfAnotherNode(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, savesAfterMisfit...)
	j.spread(1, 1)
	j.must()
	wantEnded(t, []string{"step-2.a1"}, []string{"step-1.a1"})
	var sizes []int64
	for _, b := range bodiesOf[events.LocalPlan](t, runOf(t)) {
		if b.Checkpoint == "step-2.a1" && b.Rank == 1 {
			sizes = append(sizes, b.Plan.Size)
		}
	}
	if len(sizes) != 2 || sizes[0] != 0 || sizes[1] == 0 {
		t.Errorf("plans of rank 1 in the second save have %d bytes, want a fingerprint and a plan", sizes)
	}
}

// survivesDeath saves two steps; rank 1 dies in its first life. The second life loads.
var survivesDeath = workerRole("survives the death of rank 1", func(ctx context.Context, c *client.Client) error {
	if c.Resume != "" {
		if err := load(ctx, c, c.Resume, 2); err != nil {
			return err
		}
		emit("rank %d loaded in attempt %d, restart %s", c.Rank, c.Attempt, os.Getenv("TORCHELASTIC_RESTART_COUNT"))
		return nil
	}
	for step := int64(1); step <= 2; step++ {
		if err := save(ctx, c, step); err != nil {
			return err
		}
		if err := c.Report(ctx, step, map[string]any{"loss": float64(step)}); err != nil {
			return err
		}
	}
	if c.Rank == 1 {
		return errors.New("dies")
	}
	<-ctx.Done()
	return ctx.Err()
})

// A worker that dies on another node ends the group everywhere; the next group resumes on
// all nodes, with the same ranks and the same count of restarts.
func TestDeathOnAnotherNode(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, survivesDeath...)
	j.cfg.MaxRestarts = 1
	other := j.spread(1, 1)[0]
	j.must()
	wantText(t, j.out, "rank 0 loaded in attempt 2, restart 1")
	wantText(t, other.out, "rank 1 loaded in attempt 2, restart 1")
	wantText(t, j.log, "node 1: rank 1 exited with code 1")
	if trial := trialOf(t); trial.Status != projections.Completed || trial.Attempt != 2 {
		t.Errorf("trial %+v", trial)
	}
}

// A job of several nodes that is asked to end saves on all of them, wherever the request
// comes in.
func TestPreemptedOnSeveralNodes(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, savesWhenAsked...)
	other := j.spread(1, 1)[0]
	requests := j.preemptible()
	j.start()
	other.out.await(t, 1, "[rank1] reports")
	requests <- launch.StopRequest{Preempt: true, Reason: "the test"}
	var preempted *launch.PreemptedError
	if err := j.wait(); !errors.As(err, &preempted) || !preempted.Saved {
		t.Errorf("error %v, want a preemption with a checkpoint", err)
	}
}

// savesWhenAsked reports until it is asked to end, and then saves.
var savesWhenAsked = workerRole("saves when it is asked to end", func(ctx context.Context, c *client.Client) error {
	for step := int64(1); ; step++ {
		if err := c.Report(ctx, step, map[string]any{"loss": 1.0}); err != nil {
			return err
		}
		if step == 1 {
			emit("reports")
		}
		if c.StopRequested() != "" {
			return save(ctx, c, step)
		}
	}
})

// A node that beats and does not obey is expelled: its part ends when its workers cannot live
// any more, and the job continues without it.
func TestNodeThatDoesNotObey(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, failsAlone...)
	j.cfg.MaxRestarts, j.cfg.Grace, j.cfg.DrainTimeout = 0, time.Second, time.Second
	link := j.beatsOnly()
	j.start()
	err := j.wait()
	var failed *launch.FailedError
	if !errors.As(err, &failed) || failed.Rank != 0 {
		t.Errorf("error %v, want the failure of rank 0", err)
	}
	select {
	case <-link.Done():
	case <-time.After(patience):
		t.Fatal("the node was not expelled")
	}
	if !errors.Is(link.Err(), nodes.ErrExpelled) || !strings.Contains(link.Err().Error(), "its processes have not ended for 4s") {
		t.Errorf("the link ended by %v", link.Err())
	}
	wantText(t, j.log, `msg="node lost" node=1 reason="its processes have not ended for 4s"`)
}

// failsAlone has rank 0 fail at once.
var failsAlone = workerRole("rank 0 fails", func(context.Context, *client.Client) error { return errors.New("fails") })

// A node that leaves in the middle of a save, with bytes that it has sealed and not
// written, aborts that save by name, and nothing of a committed one is lost.
func TestNodeLostInSave(t *testing.T) {
	t.Parallel()
	j := newJob(t, 2, sealsAlone...)
	j.cfg.MaxInfraRestarts = 0
	other := j.spread(1, 1)[0]
	j.start()
	other.out.await(t, 1, "[rank1] sealed")
	awaitBegun(t, j.cfg.Run)
	if err := other.link.Leave(t.Context(), "the test"); err != nil {
		t.Fatal(err)
	}
	err := j.wait()
	var failed *launch.FailedError
	if !errors.As(err, &failed) || failed.Kind != blame.Infrastructure || !strings.Contains(failed.Cause, "node 1") {
		t.Errorf("error %v, want the loss of node 1", err)
	}
	// The group ends before the log has the loss, so the reason of the abort is the loss or the end of rank 0.
	wantText(t, j.log, "checkpoint aborted", `msg="node left" node=1`)
	if left, _ := filepath.Glob(filepath.Join(filesOf(t, "*"), "r*")); len(left) > 0 {
		t.Errorf("files of the aborted save are left: %q", left)
	}
}

// awaitBegun waits until a save of a run has begun: the trainer has read a plan of it.
func awaitBegun(t *testing.T, run string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	for r, err := range home.Log.Read(ctx, 1, math.MaxUint64) {
		if err != nil {
			t.Fatal(err)
		}
		if r.Scope.Run == run && r.Kind == (events.CheckpointBegun{}).Kind() {
			return
		}
	}
}

// sealsAlone has rank 1 seal a save that rank 0 never joins.
var sealsAlone = workerRole("rank 1 seals a save alone", func(ctx context.Context, c *client.Client) error {
	if c.Rank == 1 {
		if _, err := c.Save(ctx, 1, state(1, c.Rank, c.WorldSize), client.SaveOptions{}); err != nil {
			return err
		}
		emit("sealed")
	}
	<-time.After(patience)
	return ctx.Err()
})
