package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/session"
)

// SessionBackend is the backend recorded for attempts of [Attend].
const SessionBackend = "session"

// AttendConfig configures [Attend] and [AttendPart]: each rank of the group is a
// member, an existing process.
type AttendConfig struct {
	session.Config
	Command []string // of the members, for the log
	Resume  string   // as in [Config]
	Shared  bool     // as in [Config]
	// PIDs are the processes of the members on this node, by rank, for messages.
	PIDs map[int]int
	// Serve is called once with the sockets of this node's ranks. It must not block.
	Serve func(Serving)
	// Leave is called once for each rank of this node that leaves the session, before
	// the rank's request is answered. It must not block.
	Leave func(rank int)
	// Ends delivers the end of each member on this node once. The session is over with
	// the last end of all nodes.
	Ends <-chan MemberEnd

	// Endpoint connects [Attend] with the other nodes of the session, which join it by
	// their places in Nodes within GatherTimeout; nil: it has one node.
	Endpoint      *nodes.Endpoint
	GatherTimeout time.Duration
	// Parted is called once for each rank of another node that has left, ended, or is
	// lost with its node. It must not block.
	Parted func(rank int)
}

// Serving describes a session that has begun.
type Serving struct {
	Attempt int
	Resume  string         // full ID of the checkpoint to resume from, or empty
	Sockets map[int]string // by rank of this node
	Tokens  map[int]string // by rank of this node
}

// MemberEnd is a member's end.
type MemberEnd struct {
	Rank int
	Left bool // it left the session; otherwise its process ended without leaving
}

// members holds the processes of [Attend].
type members struct{ cfg AttendConfig }

// Attend runs a job with one attempt, for processes that it has not started. It
// serves them as [Run] serves its workers, but never signals them. The caller
// holds the run's lease, and watches the processes of this node; [AttendPart] does on
// other nodes.
//
// Attend returns when all members have ended, or ctx has. It then finishes staged
// saves and pauses the trial, unless all ranks reported that they are done. Its
// error reports what the members lost, or that a member ended without leaving.
func Attend(ctx context.Context, cfg AttendConfig, store session.Store) (err error) {
	full := cfg.full()
	full.Endpoint, full.GatherTimeout, full.LastCall = cfg.Endpoint, cfg.GatherTimeout, cfg.GatherTimeout
	if err := cfg.check(full); err != nil {
		return err
	}
	j := prepare(ctx, full, store, nil)
	j.members = &members{cfg}
	if err := j.Open(); err != nil {
		return err
	}
	defer func() { err = j.Close(err) }()
	return j.run(ctx)
}

// AttendPart serves this node's members of a session that the process at the other end
// of link runs by [Attend]. It decides nothing. It returns when that process has ended
// the session, or when ctx ends: then it finishes the staged saves of its ranks first,
// as far as they do not need those of other nodes.
func AttendPart(ctx context.Context, cfg AttendConfig, store session.Store, link *nodes.Link) (err error) {
	full := cfg.full()
	if err := cfg.check(full); err != nil {
		return err
	}
	j := prepare(ctx, full, store, link)
	j.members = &members{cfg}
	if err := j.Open(); err != nil {
		return err
	}
	defer func() { err = j.Close(err) }()
	if err := j.reapLinked(ctx); err != nil {
		return err
	}
	return j.follow(ctx)
}

func (c AttendConfig) full() Config {
	return Config{Config: c.Config, Command: c.Command, Resume: c.Resume, Shared: c.Shared, Backend: SessionBackend}.withDefaults()
}

func (c AttendConfig) check(full Config) error {
	if n := len(full.Local()); n < 1 || len(c.PIDs) != n {
		return fmt.Errorf("%w: a session of %d ranks and %d processes on this node", ErrConfig, n, len(c.PIDs))
	}
	return nil
}

// attend runs the one attempt of [Attend].
func (j *job) attend(ctx context.Context) error {
	trial, resume, err := j.takeOver(ctx)
	if err != nil {
		return err
	}
	if _, err := j.gather(ctx); err != nil {
		return err
	}
	n := trial.Attempt + 1
	j.log.Info("session started", "run", j.cfg.Run, "attempt", n, "world_size", j.cfg.World(), "nodes", len(j.cfg.Nodes), "processes", j.members.pids(), "resume", cmp.Or(resume, "nothing: a fresh start"))
	cause, err := j.attempt(ctx, n, 0, resume)
	if err != nil {
		return err
	}
	after := context.WithoutCancel(ctx)
	if cause == nil && j.finished {
		return j.completed(after, n)
	}
	why := "all members have left"
	if cause != nil {
		why, err = cause.Cause, errors.New(cause.Cause)
	}
	if o, _ := j.orders.given(); o != nil && j.told {
		why = fmt.Sprintf("%s as asked (%s): %s", o.asks(), o.Reason, why)
		j.reason = session.Beginning(why, session.MaxMessage)
	}
	lost, unknown := j.lost(after)
	if lost != "" {
		why = fmt.Sprintf("%s; their last save, %s, does not exist: %s", why, j.newest.Checkpoint, lost)
		err = errors.New(why)
	}
	return errors.Join(err, unknown, j.paused(after, n, session.Beginning(why, session.MaxMessage)))
}

// pids returns the processes on this node, in the order of their ranks.
func (m *members) pids() (pids []int) {
	for _, rank := range slices.Sorted(maps.Keys(m.cfg.PIDs)) {
		pids = append(pids, m.cfg.PIDs[rank])
	}
	return pids
}

// parted reports the end of a rank of another node, if this is a session.
func (m *members) parted(rank int) {
	if m != nil && m.cfg.Parted != nil {
		m.cfg.Parted(rank)
	}
}

// serveMembers is [watch.run] for processes that the trainer did not start: it
// waits until all have ended, and signals none. After it returns, live members
// can only ask about their saves, until closeServers.
func (w *watch) serveMembers(ctx, work context.Context) (cause *FailedError, err error) {
	defer w.others.loopOver()
	defer func() {
		why := ""
		if cause != nil {
			why = cause.Cause
		}
		w.group.Refuse(why)
		for _, rank := range w.cfg.Local() { // sealed by live members
			w.group.Flush(work, rank)
		}
	}()
	at := Serving{Attempt: w.group.Number, Resume: w.group.Resume, Sockets: map[int]string{}, Tokens: map[int]string{}}
	for _, rank := range w.cfg.Local() {
		socket, token, err := w.group.Serve(rank)
		if err != nil {
			w.others.abandon(err.Error(), w.cfg.DrainTimeout)
			return nil, err
		}
		at.Sockets[rank], at.Tokens[rank] = socket, token
	}
	w.others.start(ctx, 0)
	if w.part == nil {
		w.reported = make(chan error, 1)
		go func() {
			_, err := w.group.TakeReports(work)
			w.reported <- err
		}()
	}
	defer w.works(func() bool { return true })()
	w.job.members.cfg.Serve(at)
	return w.follow(ctx, work)
}

// follow receives the members' ends until none is left, here and on the other nodes.
func (w *watch) follow(ctx, work context.Context) (cause *FailedError, err error) {
	say := func(body events.Body) {
		serr := w.Append(work, body)
		if full := syscall.ENOSPC; errors.Is(serr, full) && errors.Is(err, full) {
			return // reported once, not by each rank
		}
		err = errors.Join(err, serr)
	}
	fail := func(why *FailedError) {
		if cause == nil {
			cause = why
		}
	}
	greeted, hosts := map[int]bool{}, 1 // hosts: nodes whose ranks have not all connected
	if w.others != nil {
		hosts = len(w.cfg.Nodes)
	}
	ready := func() {
		switch hosts--; {
		case hosts > 0:
		case w.part != nil:
			w.part.tell(msgHello, attemptOnly{w.group.Number})
		default:
			say(&events.TrainingStarted{Attempt: w.group.Number})
		}
	}
	greet := func(rank int) {
		if greeted[rank] = true; len(greeted) == len(w.cfg.Local()) {
			ready()
		}
	}
	alive, done := len(w.cfg.Local()), ctx.Done()
	var limit <-chan time.Time // of the other nodes, once they have the command to stop
	stop := func() {
		alive = 0 // the members live on
		w.others.stop(cause.Cause)
		limit = time.After(w.cfg.DrainTimeout)
	}
	for alive > 0 || w.others.running() > 0 {
		select {
		case e := <-w.job.members.cfg.Ends:
			alive--
			for len(w.hello) > 0 { // its messages came before its end
				greet(<-w.hello)
			}
			why := fmt.Sprintf("rank %d (process %d%s) has left", e.Rank, w.job.members.cfg.PIDs[e.Rank], w.place())
			if !e.Left {
				why = fmt.Sprintf("rank %d (process %d%s) has ended without leaving the session", e.Rank, w.job.members.cfg.PIDs[e.Rank], w.place())
				fail(&FailedError{Rank: e.Rank, Cause: why})
			}
			w.group.EndMessages(e.Rank)
			w.group.Gone(e.Rank, errors.New(why))
			if w.part != nil {
				w.part.tell(msgExited, rankEnd{w.group.Number, e.Rank, why})
			}
			w.group.Flush(work, e.Rank)
			say(&events.WorkerExited{Attempt: w.group.Number, Rank: e.Rank, Code: -1, Unseen: true, Message: why})
		case rank := <-w.hello:
			greet(rank)
		case n := <-w.others.events():
			w.others.ended(n)
			if n.hello {
				ready()
			}
			if n.end != nil {
				fail(n.end)
			}
		case rerr := <-w.reported:
			w.reported = nil
			if rerr != nil {
				w.log.Warn("reports are no longer accepted in this session", "error", rerr)
			}
		case serr := <-w.saving:
			w.savingEnded, w.saving = true, nil
			fail(&FailedError{Rank: -1, Cause: "saves are no longer possible"})
			err = errors.Join(err, serr)
			stop()
		case <-done:
			done = nil
			fail(&FailedError{Rank: -1, Cause: context.Cause(ctx).Error()})
			stop()
		case <-limit:
			w.log.Warn("other nodes have not ended the session", "attempt", w.group.Number, "after", w.cfg.DrainTimeout)
			return cause, err
		}
	}
	return cause, err
}

// place names this node in messages about its members; empty if the job has one node.
func (w *watch) place() string {
	if w.part == nil && w.others == nil {
		return ""
	}
	host, err := os.Hostname()
	if err != nil {
		return fmt.Sprintf(" on node %d", w.cfg.Node)
	}
	return " on " + host
}
