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
	CodeUnknownKind = 60001 // no kind of event that the owner knows
	CodeNewer       = 60002 // a newer version of a kind than the owner knows
	CodeEvent       = 60003 // no event: its envelope, its headers or its body
	CodeTooLarge    = 60004
	CodeLane        = 60005 // the actor or the condition does not fit a fact or a decision
	CodeNoRoom      = 60006 // the disk is nearly full: facts are refused
	CodeDenied      = 60007 // clients may not do that
	CodeBatch       = 60008 // no batch of facts
	CodeEntry       = 60009 // no lease, cursor or witness
	CodeHeld        = 60010 // another session has the lease
	CodeBusy        = 60011 // settled by trying again

	codeWrongLast  = 10071 // the server's own: the entry has moved
	codeNoConsumer = 10014 // the server's own
)

// Refusal says why a publication was not passed on. It is answered on the reply
// subject as the server answers: with the JSON of an error.
type Refusal struct {
	Code   int // one of the codes above
	Status int // as in HTTP; 503 is settled by trying again
	Text   string
}

// Error implements error.
func (r *Refusal) Error() string { return r.Text }

func refuse(code int, format string, args ...any) *Refusal {
	return &Refusal{Code: code, Status: 400, Text: fmt.Sprintf(format, args...)}
}

// Refuse is a refusal for good.
func Refuse(code int, format string, args ...any) *Refusal { return refuse(code, format, args...) }

// WrongLast is the server's own refusal of a write to an entry that is at another
// sequence.
func WrongLast(at uint64) *Refusal { return refuse(codeWrongLast, "wrong last sequence: %d", at) }

func busy(err error) *Refusal {
	return &Refusal{Code: CodeBusy, Status: 503, Text: err.Error()}
}

// answer is the refusal on the wire.
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
