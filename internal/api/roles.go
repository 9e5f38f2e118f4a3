package api

import (
	"net/http"
	"slices"
	"strings"
)

// Role is what a user may do: a set of rights.
type Role int

// The roles.
const (
	Reader   Role = iota + 1 // reads
	Operator                 // also appends events to the log, and decides: stop, preempt, fork, pin, tag
	Admin                    // also lists who has access, and records in the log who was given it
	Auditor                  // reads the log, its evidence and who has access, and nothing else
)

// Roles are all roles.
var Roles = []Role{Reader, Operator, Admin, Auditor}

var roleNames = map[Role]string{Reader: "reader", Operator: "operator", Admin: "admin", Auditor: "auditor"}

// String returns the role's name.
func (r Role) String() string { return roleNames[r] }

// RoleOf returns the role of a name.
func RoleOf(name string) (Role, bool) {
	i := slices.IndexFunc(Roles, func(r Role) bool { return r.String() == name })
	if i < 0 {
		return 0, false
	}
	return Roles[i], true
}

// Right is one kind of request.
type Right int

// The rights.
const (
	ReadLog      Right = 1 << iota // the events
	ReadEvidence                   // signed heads, tiles and entries
	ReadAccess                     // the users and their roles
	ReadState                      // runs, checkpoints, metrics, output of workers, health
	Decide                         // append, and decide
	GiveAccess                     // record who was given access
)

// rights of the roles. An auditor checks what is signed: the log, by its evidence, and who could
// write to it. The other answers are computed by the server from the log, or are of files that
// no event covers, such as the output of workers: nothing proves them, so an auditor who has to
// distrust the server has no use for them.
var rights = map[Role]Right{
	Reader:   ReadLog | ReadEvidence | ReadState,
	Operator: ReadLog | ReadEvidence | ReadState | Decide,
	Admin:    ReadLog | ReadEvidence | ReadState | Decide | ReadAccess | GiveAccess,
	Auditor:  ReadLog | ReadEvidence | ReadAccess,
}

// May reports whether a role has rights.
func (r Role) May(right Right) bool { return rights[r]&right == right }

// rightWords are the rights in words, in the order in which they are listed.
var rightWords = []struct {
	right Right
	words string
}{
	{ReadLog, "read the log"},
	{ReadEvidence, "read the evidence of the log"},
	{ReadAccess, "list who has access"},
	{ReadState, "read runs, checkpoints, metrics and output"},
	{Decide, "append events, stop, preempt, fork, pin and tag"},
	{GiveAccess, "record in the log who was given access"},
}

// Words returns what a role may do, in words.
func (r Role) Words() []string {
	list := []string{}
	for _, w := range rightWords {
		if r.May(w.right) {
			list = append(list, w.words)
		}
	}
	return list
}

// with returns the names of the roles that have a right, for messages.
func with(right Right) string {
	var list []string
	for _, r := range Roles {
		if r.May(right) {
			list = append(list, r.String())
		}
	}
	return strings.Join(list, ", ")
}

// need returns the right that a request needs. A path that is not listed needs [ReadState]:
// the roles that are confined to a part of the API get new paths only here.
func need(r *http.Request) Right {
	if r.Method != http.MethodGet && r.Method != http.MethodHead {
		return Decide
	}
	path, _ := strings.CutPrefix(r.URL.Path, Prefix)
	first, _, _ := strings.Cut(strings.TrimPrefix(path, "/"), "/")
	switch first {
	case "whoami", "store", "openapi.json":
		return 0
	case "events", "stream", "timeline":
		return ReadLog
	case "audit":
		return ReadEvidence
	case "access":
		return ReadAccess
	}
	return ReadState
}
