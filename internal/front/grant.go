package front

import (
	"fmt"
	"path"
	"strings"
	"sync/atomic"

	"github.com/ckptstore/ckptstore/events"
)

// Grant is what the clients of a [Door] may do beyond reading. The zero value lets
// them append for every run, without deleting what a run that is not theirs has.
type Grant struct {
	// Runs are patterns of [path.Match]: clients append for the runs that match one
	// of them, and take the leases of no others. nil is every run.
	Runs []string
	// Delete lets clients append checkpoint.deleted for runs whose lease they do
	// not hold, as `ckptstore gc` and `ckptstore rm` do.
	Delete bool
	// Bytes is how much all clients of the door may append, with headers; 0 is no bound.
	Bytes int64
}

// Validate refuses patterns that match nothing and a negative bound.
func (g Grant) Validate() error {
	for _, p := range g.Runs {
		if _, err := path.Match(p, ""); err != nil || p == "" {
			return fmt.Errorf("pattern of runs %q: want one as of a shell, such as 'team-a-*'", p)
		}
	}
	if g.Bytes < 0 {
		return fmt.Errorf("%d bytes that clients may append: want 0, for no bound, or more", g.Bytes)
	}
	return nil
}

// Run reports whether clients append for a run.
func (g Grant) Run(run string) bool {
	for _, p := range g.Runs {
		if ok, err := path.Match(p, run); ok && err == nil {
			return true
		}
	}
	return g.Runs == nil
}

// quota counts what the clients of one door have appended.
type quota struct {
	most int64 // 0: no bound
	used atomic.Int64
}

// take counts bytes, or says that they are too many.
func (q *quota) take(bytes int) *Refusal {
	if q.most == 0 || q.used.Add(int64(bytes)) <= q.most {
		return nil
	}
	q.used.Add(-int64(bytes))
	return &Refusal{Code: CodeNoRoom, Status: 507, Text: fmt.Sprintf("clients have appended the %d bytes that the owner of the store lets them: serve the store with more", q.most)}
}

// Holding says who has the lease of a run.
type Holding int

// Who has it.
const (
	Free   Holding = iota // no session, or one whose term has passed
	Mine                  // the session that asks, or another of the same person
	Theirs                // a session that lives
)

// Whose says who asks for something.
type Whose struct {
	Session   string // see [HeaderSession]
	Principal Principal
	// Lives reports whether a session has a connection. It may have had one a
	// moment ago.
	Lives func(session string) bool
}

// otherRun refuses what is for a run that clients of the door leave alone.
func (g Grant) otherRun(run string) *Refusal {
	return refuse(CodeDenied, "the owner of the store does not let clients append for run %q, only for %s", run, strings.Join(g.Runs, ", "))
}

// deciding holds a decision about what a trainer does to be that of the session
// which has the lease of the run, while one has it.
func (s *session) deciding(e events.Event, reply string) *Refusal {
	deletes := e.Kind == events.CheckpointDeleted{}.Kind()
	if asked[e.Kind] || deletes && s.door.Grant.Delete {
		return nil
	}
	ctx, cancel, err := s.looking()
	defer cancel()
	holding := Free
	if err == nil {
		holding, err = s.f.o.Log.Holding(ctx, e.Scope.Run, s.whose(reply))
	}
	switch {
	case err != nil:
		return refusal(err)
	case holding == Theirs:
		return refuse(CodeDenied, "%s is for the trainer of run %q to decide, and another client has the lease of that run", e.Kind, e.Scope.Run)
	case deletes && holding != Mine:
		return refuse(CodeDenied, "clients delete checkpoints of run %q only while they have its lease: delete where the directory of the store is, or serve it with --client-delete", e.Scope.Run)
	}
	return nil
}

// whose is who publishes with a reply subject.
func (s *session) whose(reply string) Whose {
	return Whose{Session: sessionName(reply), Principal: s.principal, Lives: s.f.lives}
}

// asked are the decisions that a user makes about a run of others.
var asked = map[events.Kind]bool{
	events.TrialCreated{}.Kind():       true,
	events.TrialStopRequested{}.Kind(): true,
	events.CheckpointPinned{}.Kind():   true,
	events.CheckpointUnpinned{}.Kind(): true,
	events.CheckpointTagged{}.Kind():   true,
	events.CheckpointUntagged{}.Kind(): true,
	events.CheckpointAttached{}.Kind(): true,
}
