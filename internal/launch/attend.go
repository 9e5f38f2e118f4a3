package launch

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"syscall"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/session"
)

// SessionBackend is the backend recorded for attempts of [Attend].
const SessionBackend = "session"

// AttendConfig configures [Attend]: each rank of the group is a member, an
// existing process.
type AttendConfig struct {
	session.Config
	Command []string // of the members, for the log
	Resume  string   // as in [Config]
	// PIDs are the processes of the members, by rank, for messages.
	PIDs []int
	// Serve is called once with the sockets of the ranks. It must not block.
	Serve func(Serving)
	// Leave is called once for each rank that leaves the session, before the
	// rank's request is answered. It must not block.
	Leave func(rank int)
	// Ends delivers the end of each member once. The session is over with the
	// last end.
	Ends <-chan MemberEnd
}

// Serving describes a session that has begun.
type Serving struct {
	Attempt int
	Resume  string   // full ID of the checkpoint to resume from, or empty
	Sockets []string // by rank
	Tokens  []string // by rank
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
// holds the run's lease, and watches the processes.
//
// Attend returns when all members have ended, or ctx has. It then finishes staged
// saves and pauses the trial, unless all ranks reported that they are done. Its
// error reports what the members lost, or that a member ended without leaving.
func Attend(ctx context.Context, cfg AttendConfig, store session.Store) (err error) {
	full := Config{Config: cfg.Config, Command: cfg.Command, Resume: cfg.Resume, Backend: SessionBackend}.withDefaults()
	if n := len(full.Local()); n < 1 || len(cfg.PIDs) != n {
		return fmt.Errorf("%w: a session of %d ranks and %d processes", ErrConfig, n, len(cfg.PIDs))
	}
	j := prepare(ctx, full, store, nil)
	j.members = &members{cfg}
	if err := j.Open(); err != nil {
		return err
	}
	defer func() { err = j.Close(err) }()
	return j.run(ctx)
}

// attend runs the one attempt of [Attend].
func (j *job) attend(ctx context.Context) error {
	trial, resume, err := j.takeOver(ctx)
	if err != nil {
		return err
	}
	n := trial.Attempt + 1
	j.log.Info("session started", "run", j.cfg.Run, "attempt", n, "world_size", j.cfg.World(), "processes", j.members.cfg.PIDs, "resume", cmp.Or(resume, "nothing: a fresh start"))
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

// serveMembers is [watch.run] for processes that the trainer did not start: it
// waits until all have ended, and signals none. After it returns, live members
// can only ask about their saves, until closeServers.
func (w *watch) serveMembers(ctx, work context.Context) (cause *FailedError, err error) {
	w.reported = make(chan error, 1)
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
	at := Serving{Attempt: w.group.Number, Resume: w.group.Resume}
	for _, rank := range w.cfg.Local() {
		socket, token, err := w.group.Serve(rank)
		if err != nil {
			return nil, err
		}
		at.Sockets, at.Tokens = append(at.Sockets, socket), append(at.Tokens, token)
	}
	go func() {
		_, err := w.group.TakeReports(work)
		w.reported <- err
	}()
	defer w.works(func() bool { return true })()
	w.job.members.cfg.Serve(at)
	return w.follow(ctx, work)
}

// follow receives the members' ends until none is left.
func (w *watch) follow(ctx, work context.Context) (cause *FailedError, err error) {
	say := func(body events.Body) {
		serr := w.Append(work, body)
		if full := syscall.ENOSPC; errors.Is(serr, full) && errors.Is(err, full) {
			return // reported once, not by each rank
		}
		err = errors.Join(err, serr)
	}
	greeted := map[int]bool{}
	greet := func(rank int) {
		if greeted[rank] = true; len(greeted) == len(w.cfg.Local()) {
			say(&events.TrainingStarted{Attempt: w.group.Number})
		}
	}
	for alive := len(w.cfg.Local()); alive > 0; {
		select {
		case e := <-w.job.members.cfg.Ends:
			alive--
			for len(w.hello) > 0 { // its messages came before its end
				greet(<-w.hello)
			}
			why := fmt.Sprintf("rank %d (process %d) has left", e.Rank, w.job.members.cfg.PIDs[e.Rank])
			if !e.Left {
				why = fmt.Sprintf("rank %d (process %d) has ended without leaving the session", e.Rank, w.job.members.cfg.PIDs[e.Rank])
				if cause == nil {
					cause = &FailedError{Rank: e.Rank, Cause: why}
				}
			}
			w.group.EndMessages(e.Rank)
			w.group.Gone(e.Rank, errors.New(why))
			w.group.Flush(work, e.Rank)
			say(&events.WorkerExited{Attempt: w.group.Number, Rank: e.Rank, Code: -1, Unseen: true, Message: why})
		case rank := <-w.hello:
			greet(rank)
		case rerr := <-w.reported:
			w.reported = nil
			if rerr != nil {
				w.log.Warn("reports are no longer accepted in this session", "error", rerr)
			}
		case serr := <-w.saving:
			w.savingEnded, w.saving = true, nil
			return &FailedError{Rank: -1, Cause: "saves are no longer possible"}, errors.Join(err, serr)
		case <-ctx.Done():
			return &FailedError{Rank: -1, Cause: context.Cause(ctx).Error()}, err
		}
	}
	return cause, err
}
