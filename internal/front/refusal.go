package front

import (
	"encoding/json"
	"fmt"
	"path"
	"strings"
	"sync/atomic"

	"github.com/ckptstore/ckptstore/events"
)

// Codes of refusals, in a range that the server does not use.
const (
	CodeUnknownKind = 60001 // kind of event unknown to the owner
	CodeNewer       = 60002 // version of a kind newer than the owner's
	CodeEvent       = 60003 // invalid event: its envelope, its headers or its body
	CodeTooLarge    = 60004
	CodeLane        = 60005 // actor or condition does not fit a fact or a decision
	CodeNoRoom      = 60006 // the disk is nearly full: facts are refused
	CodeDenied      = 60007 // not allowed to clients
	CodeBatch       = 60008 // invalid batch of facts
	CodeEntry       = 60009 // invalid lease, cursor or witness
	CodeHeld        = 60010 // another session has the lease
	CodeBusy        = 60011 // retry

	codeWrongLast  = 10071 // the server's own: the entry has moved
	codeNoConsumer = 10014 // the server's own
)

// Refusal is the reason why a publication was not passed on. It is sent on the
// reply subject in the server's format: the JSON of an error.
type Refusal struct {
	Code   int // one of the codes above
	Status int // as in HTTP; 503: retry
	Text   string
}

// Error implements error.
func (r *Refusal) Error() string { return r.Text }

func refuse(code int, format string, args ...any) *Refusal {
	return &Refusal{Code: code, Status: 400, Text: fmt.Sprintf(format, args...)}
}

// Refuse returns a permanent refusal.
func Refuse(code int, format string, args ...any) *Refusal { return refuse(code, format, args...) }

// WrongLast returns the server's own refusal of a write to an entry that is at
// another sequence.
func WrongLast(at uint64) *Refusal { return refuse(codeWrongLast, "wrong last sequence: %d", at) }

func busy(err error) *Refusal {
	return &Refusal{Code: CodeBusy, Status: 503, Text: err.Error()}
}

// answer encodes the refusal.
func (r *Refusal) answer() []byte {
	type apiError struct {
		Code    int    `json:"code"`
		ErrCode int    `json:"err_code"`
		Text    string `json:"description"`
	}
	text, err := json.Marshal(struct {
		Error  apiError `json:"error"`
		Stream string   `json:"stream"`
		Seq    uint64   `json:"seq"`
	}{Error: apiError{r.Status, r.Code, r.Text}})
	if err != nil {
		panic("encode a refusal: " + err.Error()) // a struct of strings and numbers
	}
	return text
}

// Grant is what the clients of a [Door] may do in addition to reading. The zero
// value allows them to append for every run, but not to delete from runs that are
// not theirs.
type Grant struct {
	// Runs are patterns of [path.Match]: clients may append for matching runs,
	// and take the leases of those only. nil is every run; empty is none.
	Runs []string
	// Delete allows clients to append checkpoint.deleted for runs whose lease
	// they do not hold, as `ckptstore gc` and `ckptstore rm` do.
	Delete bool
	// Access allows clients to record in the log who was given access, and who lost it.
	Access bool
	// LogAlone confines clients to the log: they read no leases and cursors, and write none.
	LogAlone bool
	// Bytes bounds what all clients of the door may append, with headers; 0: no
	// bound.
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

// Run reports whether clients may append for a run.
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

// take counts bytes, or refuses them as too many.
func (q *quota) take(bytes int) *Refusal {
	if q.most == 0 || q.used.Add(int64(bytes)) <= q.most {
		return nil
	}
	q.used.Add(-int64(bytes))
	return &Refusal{Code: CodeNoRoom, Status: 507, Text: fmt.Sprintf("clients have appended the %d bytes that the owner of the store allows: serve the store with more", q.most)}
}

// Holding is the state of a run's lease.
type Holding int

// States of a lease.
const (
	Free   Holding = iota // no session, or a session whose term has passed
	Mine                  // the asking session, or another one of the same person
	Theirs                // another live session
)

// Whose identifies the caller of a query.
type Whose struct {
	Session   string // see [HeaderSession]
	Principal Principal
	// Lives reports whether a session has a connection, or may have had one a
	// moment ago.
	Lives func(session string) bool
}

// otherRun refuses a publication for a run outside of the door's grant.
func (g Grant) otherRun(run string) *Refusal {
	if len(g.Runs) == 0 {
		return refuse(CodeDenied, "the owner of the store lets this client read, and not append: ask its operator for another role")
	}
	return refuse(CodeDenied, "the owner of the store does not let clients append for run %q, only for %s", run, strings.Join(g.Runs, ", "))
}

// deciding checks that a trainer's decision comes from the session with the lease
// of the run, if a session has the lease.
func (s *session) deciding(e events.Event, reply string) *Refusal {
	deletes := e.Kind == events.CheckpointDeleted{}.Kind()
	if asked[e.Kind] || accesses[e.Kind] || deletes && s.door.Grant.Delete {
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

// whose returns the identity of the publisher with a reply subject.
func (s *session) whose(reply string) Whose {
	return Whose{Session: sessionName(reply), Principal: s.principal, Lives: s.f.lives}
}

// accesses are the decisions about users.
var accesses = map[events.Kind]bool{
	events.AccessGranted{}.Kind(): true,
	events.AccessRevoked{}.Kind(): true,
}

// asked are the decisions that a user makes about other users' runs.
var asked = map[events.Kind]bool{
	events.TrialCreated{}.Kind():       true,
	events.TrialStopRequested{}.Kind(): true,
	events.CheckpointPinned{}.Kind():   true,
	events.CheckpointUnpinned{}.Kind(): true,
	events.CheckpointTagged{}.Kind():   true,
	events.CheckpointUntagged{}.Kind(): true,
	events.CheckpointAttached{}.Kind(): true,
}
