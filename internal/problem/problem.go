// Package problem gives errors a kind, and each kind its HTTP status and its exit
// codes. The word is that of RFC 9457, problem details for HTTP APIs.
//
//	Kind    one row of the table: not_found, conflict, no_space, …
//	New     a sentinel with a kind
//	Errorf  an error with a kind; Wrap gives one to an error that exists
//	Kinds   the kinds that the errors of a chain declare
//
// An error declares its kind where it is declared: a sentinel by [New], an error
// type by a method ProblemKind. Servers and commands look the status and the exit
// code up by the kind, so that none of them lists errors. Errors of the system,
// such as a full disk, declare nothing: package system knows these.
package problem

import (
	"errors"
	"fmt"
)

// Kind is the sort of failure that an error reports. The empty kind is
// [Internal].
type Kind string

// The kinds.
const (
	Internal     Kind = "internal"      // this program's fault, or unknown
	Invalid      Kind = "invalid"       // a request, an option or a configuration is wrong
	BadReference Kind = "bad_reference" // a reference is not well formed
	Ambiguous    Kind = "ambiguous"     // a reference stands for several checkpoints
	NotFound     Kind = "not_found"     // what a request names does not exist
	MissingFile  Kind = "missing_file"  // a file that no request names does not exist
	Conflict     Kind = "conflict"      // another process or an earlier decision is in the way
	NotCommitted Kind = "not_committed" // the checkpoint is open, aborted or deleted
	Findings     Kind = "findings"      // a check has found something and reported it
	Damage       Kind = "damage"        // stored bytes are not those that were written
	Newer        Kind = "newer"         // a newer version wrote it
	Foreign      Kind = "foreign"       // it belongs to another store or another program
	NoStore      Kind = "no_store"      // there is no store, or none answers
	Locked       Kind = "locked"        // another process holds a lock and does not answer
	Denied       Kind = "denied"        // a server, an owner or a trust check refuses this user
	NoAccess     Kind = "no_access"     // the operating system refuses a file to this process
	Unauthorized Kind = "unauthorized"  // the bearer token is missing or wrong
	Gone         Kind = "gone"          // the caller has left
	Moved        Kind = "moved"         // the state changed after the client had read it
	UnknownPlan  Kind = "unknown_plan"  // the server does not have the plan of a save
	Unavailable  Kind = "unavailable"   // not now: the server is stopping or has no room for the request
	Late         Kind = "late"          // a deadline passed
	NoSpace      Kind = "no_space"      // a disk, a quota or shared memory is full
	Failed       Kind = "failed"        // the job failed, and this program did not
	Policy       Kind = "policy"        // a proof lacks what the verifier's policy wants
)

// row is the meaning of a kind outside this process.
type row struct {
	kind      Kind
	status    int // of HTTP
	ckptstore int // exit code
	trainer   int // exit code
	title     string
}

// table is the one table from kinds to statuses and exit codes.
//
// The two programs differ where they must: for a scheduler, a wrongly configured
// job (64) differs from a failed one (1). The trainer wraps references of the
// user in launch.ErrConfig (64). A reference that it looks up itself must exist,
// so its absence is internal (70).
var table = []row{
	{Internal, 500, 1, 70, "internal error"},
	{Invalid, 400, 2, 64, "invalid request"},
	{BadReference, 400, 2, 64, "bad reference"},
	{Ambiguous, 400, 2, 70, "ambiguous reference"},
	{NotFound, 404, 4, 70, "not found"},
	{MissingFile, 500, 1, 70, "missing file"},
	{Conflict, 409, 5, 5, "conflict"},
	{NotCommitted, 409, 1, 70, "checkpoint not committed"},
	{Findings, 409, 6, 6, "findings"},
	{Damage, 500, 6, 64, "damaged data"},
	{Newer, 409, 1, 64, "written by a newer version"},
	{Foreign, 409, 1, 64, "belongs to another store or program"},
	{NoStore, 503, 10, 10, "no store"},
	{Locked, 423, 11, 11, "locked"},
	{Denied, 403, 12, 12, "not allowed"},
	{NoAccess, 500, 12, 64, "no access to a file"},
	{Unauthorized, 401, 1, 64, "wrong token"},
	{Gone, 410, 1, 70, "gone"},
	{Moved, 412, 5, 5, "changed meanwhile"},
	{UnknownPlan, 412, 1, 70, "unknown plan"},
	{Unavailable, 503, 1, 70, "unavailable"},
	{Late, 504, 1, 70, "deadline passed"},
	{NoSpace, 507, 1, 1, "no space"},
	{Failed, 500, 1, 1, "failed"},
	{Policy, 409, 7, 7, "policy not met"},
}

var rows = func() map[Kind]row {
	m := make(map[Kind]row, len(table))
	for _, r := range table {
		m[r.kind] = r
	}
	return m
}()

// row returns the row of k; an unknown kind of a newer program has the row of
// [Internal].
func (k Kind) row() row {
	if r, ok := rows[k]; ok {
		return r
	}
	return rows[Internal]
}

// Status returns the HTTP status.
func (k Kind) Status() int { return k.row().status }

// Ckptstore returns the exit code of the command ckptstore.
func (k Kind) Ckptstore() int { return k.row().ckptstore }

// Trainer returns the exit code of the command trainer.
func (k Kind) Trainer() int { return k.row().trainer }

// Title returns the kind in words, the same for every error of the kind.
func (k Kind) Title() string { return k.row().title }

// kinded is an error that declares its kind. The method is not called Kind,
// because some error types have a field of that name.
type kinded interface{ ProblemKind() Kind }

// sentinel is the type of the errors of [New].
type sentinel struct {
	kind Kind
	text string
}

func (s *sentinel) Error() string     { return s.text }
func (s *sentinel) ProblemKind() Kind { return s.kind }

// New returns a sentinel with a kind, in place of errors.New.
func New(kind Kind, text string) error { return &sentinel{kind, text} }

// Error is an error whose kind was given by its caller. It exists so that a
// handler can distinguish it from an error with the kind of its cause.
type Error struct {
	kind Kind
	err  error
}

// Error returns the text of the cause alone.
func (e *Error) Error() string { return e.err.Error() }

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.err }

// ProblemKind returns the kind that the caller gave.
func (e *Error) ProblemKind() Kind { return e.kind }

// Wrap gives err a kind, which takes precedence over the kinds of err itself. It
// returns nil for nil.
func Wrap(kind Kind, err error) error {
	if err == nil {
		return nil
	}
	return &Error{kind, err}
}

// Errorf is [fmt.Errorf] with a kind.
func Errorf(kind Kind, format string, args ...any) error {
	return &Error{kind, fmt.Errorf(format, args...)}
}

// Kinds returns the kinds that err and the errors in it declare, outermost first:
// the wrapping code knows best what the error means to its caller. Joined errors
// come in order.
func Kinds(err error) []Kind { return appendKinds(nil, err) }

func appendKinds(to []Kind, err error) []Kind {
	if err == nil {
		return to
	}
	if e, ok := err.(kinded); ok {
		if kind := e.ProblemKind(); kind != "" {
			to = append(to, kind)
		}
	}
	switch e := err.(type) { //nolint:errorlint // this walks the chain
	case interface{ Unwrap() error }:
		return appendKinds(to, e.Unwrap())
	case interface{ Unwrap() []error }:
		for _, err := range e.Unwrap() {
			to = appendKinds(to, err)
		}
	}
	return to
}

// Given reports whether a caller gave err a kind by [Wrap] or [Errorf].
func Given(err error) bool { return errors.As(err, new(*Error)) }
