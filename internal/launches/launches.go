// Package launches records in this user's state directory which job.started
// events this user's own trainers appended.
//
// `ckptstore continue` executes the command of such an event, and any client that
// can append to a log can forge one. A header, an address or a server's answer
// proves nothing against that. A record does: only a process of this user can
// have written it, and it covers everything of the event that continue executes.
//
//	$XDG_STATE_HOME/ckptstore/   or ~/.local/state/ckptstore; 0700
//	  launches/                  0700
//	    KEY.json                 0600: the last launch of one run; KEY is the SHA-256
//	                             of the store's identity, its copy and the run
//
// Without a record, for example if the trainer had another home, nothing is
// proven and continue asks.
package launches

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"syscall"
	"time"

	"github.com/ckptstore/ckptstore/events"
)

// ErrUnproven is returned if this user's trainers have not recorded a launch.
var ErrUnproven = errors.New("nothing proves that this user started it")

// Launch describes one job.started in one store, with everything that `ckptstore
// continue` executes of it. Two launches are equal only if the same command would
// run in the same directory.
type Launch struct {
	Store    string `json:"store"`          // identity
	Copy     string `json:"copy,omitempty"` // name of a backup or a restored store
	Run      string `json:"run"`
	Event    string `json:"event"` // ID
	Sequence uint64 `json:"sequence"`
	Body     string `json:"body"` // SHA-256 of the event's body, as the log has it: command, flags, directory
	// DirOwner is the user who owned the working directory. Another user may
	// since have created a directory of that name, with other programs in it.
	DirOwner uint32 `json:"dir_owner"`
}

// Of describes the job.started of a store, in its working directory.
func Of(store, copied string, started events.Recorded, dir fs.FileInfo) Launch {
	sum := sha256.Sum256(started.Data)
	return Launch{
		Store: store, Copy: copied, Run: started.Scope.Run, Event: started.ID, Sequence: started.Sequence,
		Body: hex.EncodeToString(sum[:]), DirOwner: owner(dir),
	}
}

// key returns the name of a launch's file. Quoting keeps the parts apart.
func (l Launch) key() string {
	sum := sha256.Sum256(fmt.Appendf(nil, "%q %q %q", l.Store, l.Copy, l.Run))
	return hex.EncodeToString(sum[:]) + ".json"
}

// differs returns the first difference from the recorded launch, "" if there is
// none.
func (l Launch) differs(recorded Launch) string {
	switch {
	case l == recorded:
		return ""
	case l.Sequence != recorded.Sequence || l.Event != recorded.Event:
		return fmt.Sprintf("the last launch of run %q by this user is event %d, and this is event %d", l.Run, recorded.Sequence, l.Sequence)
	case l.Body != recorded.Body:
		return fmt.Sprintf("this user's trainer appended event %d with another body", l.Sequence)
	case l.DirOwner != recorded.DirOwner:
		return fmt.Sprintf("its directory belonged to user %d and now belongs to user %d", recorded.DirOwner, l.DirOwner)
	}
	return "the record is of another store or run"
}

func owner(info fs.FileInfo) uint32 { return info.Sys().(*syscall.Stat_t).Uid }

// answerTime bounds how long a home directory on a network may take.
const answerTime = 5 * time.Second

// within calls do, and abandons it when ctx or its time ends: a context cannot
// interrupt a call to a filesystem that does not answer.
func within[T any](ctx context.Context, do func() (T, error)) (T, error) {
	type answer struct {
		value T
		err   error
	}
	ctx, cancel := context.WithTimeoutCause(ctx, answerTime, fmt.Errorf("its filesystem does not answer within %v", answerTime))
	defer cancel()
	answers := make(chan answer, 1)
	go func() {
		value, err := do()
		answers <- answer{value, err}
	}()
	select {
	case a := <-answers:
		return a.value, a.err
	case <-ctx.Done():
		var none T
		return none, context.Cause(ctx)
	}
}
