// Package session serves one group of ranks, on one node or on several.
//
//	Config      which group: the run, the ranks of each node, the limits
//	Job         one job's hold on its trial: facts, decisions, shared memory
//	Group       one attempt's group of ranks, from Job.Begin to Group.Close
//	rankServer  the socket of one rank
//	saver       feeds the log to the save coordinator and executes its commands
//	adopted     saves of a dead trainer, finished from shared memory
//	decisions   the decisions of an attempt, refused by the log once fenced
//	retriedLog  the log as a job sees it: calls wait for an answer, or for room
//	Import      a job with one attempt and one save, of another program's checkpoint
//
// A session neither starts, watches nor ends processes. Its caller does that,
// provides what a session needs through [Orders], [Signals] and [Hooks], and calls
// [Group.Gone] when a rank leaves.
//
// The rooms below it know no group:
//
//	staging      the shared memory by which ranks save and load
//	restore      the loads of ranks; broadcast passes blocks among nodes
//	handoff      the reports of ranks
//	mailbox      messages among ranks, and their key-value store
//	outbox       facts of ranks on their way to the log
//	retry        how calls wait for the log
//	contract     what a storage of the job must do
//	connections  the requests of a server that ends
//	dedup        requests of other nodes that are repeated
//	sweep        the removal of files of aborted saves
//	replica      copies of sealed slots on other nodes; heirs finds the node that writes them
//	pulse        requests of ranks as signs of life
//
// A session's knowledge comes from the log. Its decisions are appended there before
// they take effect.
//
// One process serves the ranks of one node. Of a group on several nodes, one process
// is the coordinating one. Only it decides, and the reports, messages and collectives
// of all ranks meet in its memory: the other processes relay them to it, see [Peer].
// Loads meet there too, node by node: see [restore.Meeting].
// It alone reads the log, and forwards what concerns all ranks. Each process writes what
// its own ranks have sealed.
package session

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session/dedup"
	"github.com/ckptstore/ckptstore/internal/session/handoff"
	"github.com/ckptstore/ckptstore/internal/session/mailbox"
	"github.com/ckptstore/ckptstore/internal/session/pulse"
	"github.com/ckptstore/ckptstore/internal/session/replica"
	"github.com/ckptstore/ckptstore/internal/session/restore"
	"github.com/ckptstore/ckptstore/internal/session/staging"
	"github.com/ckptstore/ckptstore/internal/session/sweep"
	"github.com/ckptstore/ckptstore/internal/stragglers"
	"github.com/ckptstore/ckptstore/planner"
)

// Group is the session of one attempt's group of ranks, as the node of this
// process sees it: the sockets of the local ranks, and the state that all ranks
// share. [Job.Begin] returns one.
type Group struct {
	Attempt
	cfg       Config
	store     Store
	log       *slog.Logger
	decisions *decisionLog
	runtime   string // directory of the sockets
	slots     *staging.Slots
	work      context.Context // ends with the attempt
	saver     *saver
	saved     chan error // the saver's end
	handoff   *handoff.Handoff
	loader    *restore.Loader
	meeting   *restore.Meeting // of the loads of all nodes; nil: there is one, or another process has it
	hello     chan int         // a rank, at its first hello
	pulses    *pulse.Ranks
	servers   []*rankServer // of the ranks on this node

	mail mailbox.Boxes
	keys mailbox.Store
	membership
	names    saveNames
	writers  sweep.Writers // of files of aborted saves
	relays   dedup.Answers
	heard    atomic.Uint64     // sequence of the last event that the coordinating process has forwarded
	senders  []*replica.Sender // of sealed slots, one for each partner
	everyone ranksOnce
}

// Begin begins the session of an attempt's group: it follows the group's saves
// from now on, and [Group.Serve] serves the ranks one by one. work ends the
// session. The caller calls [Group.Close] before it closes the job.
func (j *Job) Begin(work context.Context, a Attempt) *Group {
	cfg := j.cfg
	if a.Nodes != nil {
		cfg.Nodes, cfg.Node = a.Nodes, a.Node
	}
	cfg.peers = a.Replicas.from()
	world := cfg.World()
	j.world = world
	if a.Hub == nil {
		a.Hub = a.Resumed.hub(world)
	}
	g := &Group{
		cfg: cfg, Attempt: a, store: j.store, decisions: j.decisions, log: j.log, runtime: j.runtime,
		slots: staging.New(j.arenas, cfg.staging(j.log)), work: work, hello: make(chan int, world), pulses: pulse.New(world),
		saved: make(chan error, 1),
	}
	g.loader = j.newLoader(g)
	reports := handoff.Config{
		Attempt: a.Number, World: world, Limit: cfg.Collective, Now: cfg.Now, Calls: j.store.calls, Log: j.log,
		Record: j.writer.measured, Told: cfg.Reported,
	}
	var slow *stragglers.Watch
	if a.Peer == nil && len(cfg.Nodes) > 1 {
		slow = stragglers.New(cfg.Job, a.Number, cfg.Nodes, a.index)
		reports.Slower = func(busy []float64) []events.Body { return logSlow(j.log, slow.Sample(stragglers.Busy, busy)) }
	}
	if a.Orders != nil {
		reports.Stop = a.Orders.Tell
	}
	g.handoff = handoff.New(reports)
	if a.Resumed != nil {
		g.handoff.Resume(a.Resumed.Earlier)
	}
	coordinator := j.coordinator(a.Number, world)
	coordinator.Part = a.Peer != nil
	g.saver = newSaver(j.decisions, j.store, planner.NewCoordinator(coordinator), j.log, g.slots)
	g.saver.onCommit(cfg.Committed, cfg.Costs)
	g.saver.resume, g.saver.together, g.saver.local, g.saver.peer, g.saver.forward = a.Resume, true, cfg.Local(), a.Peer, a.Forward
	if a.Peer != nil {
		g.saver.feed = newFeed(cfg.Trial)
	}
	j.writer.heard.Store(g.saver.feed)
	if len(cfg.Nodes) > 1 {
		g.saver.joined = j.writer.join(work, cfg.Local())
	}
	if g.saver.local == nil {
		g.saver.local = []int{} // none: nil means all
	}
	g.saver.slow = slow
	if a.Peer == nil && cfg.apart() {
		g.writers.Expect(cfg.others()...)
		g.saver.settled = g.writers.Abort
	}
	g.replicate(work, j.keeper)
	g.loader.Prove()
	if r := a.Replicas; r != nil && r.Ahead && a.Resumed == nil {
		g.loader.FetchAhead()
	}
	g.saver.over = func(err error) { g.saved <- err }
	known := a.Started
	if of := a.Resumed; of != nil {
		known, g.saver.replayed, g.saver.heard = of.Known, of.Known, of.Heard
		if g.meeting != nil {
			g.meeting.After(of.Loads)
		}
	}
	go func() { _ = g.saver.run(work, a.Started, known) }()
	return g
}

// Close waits for running loads and frees the group's slots. It returns
// [ErrStuck] if a load does not end.
func (g *Group) Close() (err error) {
	if !g.closeLoads() {
		err = fmt.Errorf("%w: a load was stopped %v ago and has not ended; look at the disk of the store, then start the run again", ErrStuck, g.cfg.DrainTimeout)
	}
	g.stopSending()
	g.saver.held.Close()
	g.slots.Close()
	g.writers.Close()
	return err
}

// File returns the path of a file of a rank in the runtime directory of the job.
func (g *Group) File(rank int, what string) string {
	return filepath.Join(g.runtime, fmt.Sprintf("a%d-r%d.%s", g.Number, rank, what))
}

// Serve opens the socket of a local rank and serves it. It returns the socket and
// its token. It must not be called concurrently.
func (g *Group) Serve(rank int) (socket, token string, err error) {
	socket, token = g.File(rank, "sock"), rand.Text()
	s, err := g.serveRank(rank, socket, token)
	if err != nil {
		return "", "", err
	}
	g.servers = append(g.servers, s)
	return socket, token, nil
}

// Hello yields each rank at its first hello.
func (g *Group) Hello() <-chan int { return g.hello }

// Saved yields the end of the group's saves, once: an error, or nil after
// [Group.Drain].
func (g *Group) Saved() <-chan error { return g.saved }

// TakeReports collects the reports of all ranks, one iteration at a time, until
// every rank has ended. It returns how many iterations the log has, or will have
// after [Group.SettleReports]. It returns an [handoff.UnevenError] if ranks disagree on
// whether there is another iteration, and a [retry.RefusedError] if the log refused
// one.
func (g *Group) TakeReports(ctx context.Context) (iterations int, err error) {
	return g.handoff.Run(ctx)
}

// EndReports records that no process is left to wait for the room that reports
// need.
func (g *Group) EndReports() { g.handoff.EndReports() }

// SettleReports ends the reports and waits until all that were taken are in the
// log or refused.
func (g *Group) SettleReports() { g.handoff.Settle() }

// Step returns the step of the newest reported iteration, or -1 before the first.
func (g *Group) Step() int64 { return g.handoff.Step() }

// Finished reports whether every rank has made its last report and all reports
// are answered.
func (g *Group) Finished() bool { return g.handoff.Finished() }

// EndMessages records that a rank's process has ended: messages to it fail. It
// may be called concurrently.
func (g *Group) EndMessages(rank int) { g.mail.Gone(rank) }

// Gone frees the ranks that wait for a rank that left because of why. A report
// that the rank handed over still counts. It is called once per rank.
func (g *Group) Gone(rank int, why error) {
	g.handoff.Ended(rank)
	why = fmt.Errorf("%w, so the group cannot meet any more", why)
	g.Hub.Close(why)
	g.endLoads(rank, why)
}

// Flush waits until the log has the seals that a rank got replies for.
func (g *Group) Flush(work context.Context, rank int) {
	ctx, cancel := g.store.calls.Timeout(work, g.cfg.DrainTimeout)
	defer cancel()
	for _, s := range g.servers {
		if s.rank != rank {
			continue
		}
		if err := s.outbox.Flush(ctx); err != nil {
			g.log.Warn("flush of a rank's seals failed", "rank", rank, "error", err)
		}
	}
}

// CloseServers ends the sockets of all ranks, and every request to them.
func (g *Group) CloseServers() (err error) {
	for _, s := range g.servers {
		err = errors.Join(err, s.close())
	}
	g.servers = nil
	return err
}

// EndCollectives ends the collectives of the group.
func (g *Group) EndCollectives(why error) { g.Hub.Close(why) }

// replyLimit bounds the time of the last replies to live processes, all together.
const replyLimit = 5 * time.Second

// ShutDownServers ends the service to live processes. Requests for the state of a
// save are answered: it is decided by now. Ranks that wait for each other get an
// error.
func (g *Group) ShutDownServers() (err error) {
	over := errors.New("the session is over")
	g.Hub.Close(over)
	g.endLoads(restore.All, over)
	ctx, cancel := context.WithTimeout(context.Background(), replyLimit)
	defer cancel()
	for _, s := range g.servers {
		if serr := s.finish(ctx); serr != nil {
			g.log.Warn("requests of a rank cut off", "rank", s.rank, "error", serr)
		}
		err = errors.Join(err, s.close())
	}
	g.servers = nil
	return err
}

// Drain finishes the saves that all ranks have staged, after their processes are
// gone, and aborts the rest with the reason why. ended reports that the group's
// saves have ended; otherwise the caller stops them with [Group.StopSaves]. It
// returns [ErrDrain] if the saves were not finished in time.
func (g *Group) Drain(ctx context.Context, why string) (ended bool, err error) {
	end := uint64(math.MaxUint64)
	if g.Peer != nil {
		g.saver.feed.put(fed{event: events.Recorded{Sequence: end}}) // after all that this part has received and appended
	} else if end, err = g.store.Log.LastOf(ctx, g.decisions.agg); err != nil {
		return false, err
	}
	g.saver.drain <- drain{why, end}
	drained, cancel := g.store.calls.Timeout(context.WithoutCancel(ctx), g.cfg.DrainTimeout)
	defer cancel()
	select {
	case err := <-g.saved:
		return true, err
	case <-g.Closed:
		return false, nil
	case <-drained.Done():
		g.log.Warn("staged saves abandoned: not finished in time", "drain_timeout", g.cfg.DrainTimeout)
	}
	return false, ErrDrain
}

// Answering returns a context that ends when the log has answered for so long.
func (g *Group) Answering(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	return g.store.calls.Timeout(ctx, limit)
}

// StopSaves waits for the end of the saves after the session's context has ended.
// It returns [ErrStuck] if a write does not end.
func (g *Group) StopSaves() error {
	timer := time.NewTimer(g.cfg.DrainTimeout)
	defer timer.Stop()
	select {
	case err := <-g.saved:
		if err != nil && !errors.Is(err, context.Canceled) {
			g.log.Warn("saver failed after the attempt", "error", err)
		}
		return nil
	case <-timer.C:
		return fmt.Errorf("%w: its writes were stopped %v ago and have not ended; look at the disk of the store, then start the run again", ErrStuck, g.cfg.DrainTimeout)
	}
}

// LastSave is the newest save of a group, according to its ranks and the log.
type LastSave struct {
	Checkpoint string // empty: none
	Unbegun    string // why the log has not begun it; empty if it has or the reason is unknown
}

// LastSave returns the newest save of the group.
func (g *Group) LastSave() LastSave { return g.saver.last() }

// Pulses returns the signs of life of the ranks that live on this node.
func (g *Group) Pulses() *pulse.Ranks { return g.pulses }

// ErrDrain reports that staged saves were not finished in time.
var ErrDrain = errors.New("staged saves were not finished in time")

// ErrStuck reports that a read or write does not end even after its cancellation.
var ErrStuck = errors.New("a disk does not answer")
