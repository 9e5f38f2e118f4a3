// Package auditreport collects what an auditor reads about one run, and renders it.
//
//	Report      the facts: who decided what and when, from which parent, which bytes
//	New         reads them: the rows of the run and its lanes of decisions
//	JSON        the report as one object
//	Markdown    for a ticket or a repository
//	HTML        one file without scripts or other resources
//
// The cost follows from the jobs, attempts, checkpoints, loads and decisions of the run, and from
// the decisions about the store, not from the log and not from its reports of metrics: these are
// counted.
package auditreport

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"iter"
	"slices"
	"time"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/projections"
)

// Report is all that is known of a run as of an event of the log.
type Report struct {
	Store       string       `json:"store"`
	Run         string       `json:"run"`
	AsOf        uint64       `json:"as_of"`        // sequence of the last event that the report covers
	AsOfStored  time.Time    `json:"as_of_stored"` // when the log stored it
	Head        *Head        `json:"head"`         // the newest; nil: nothing proves the log to an outsider
	Proven      string       `json:"proven"`       // what the head covers, in words
	Jobs        []Job        `json:"jobs"`         // in the order of their start
	Trials      []Trial      `json:"trials"`
	Origins     []Origin     `json:"origins"`     // checkpoints outside of the run that it follows from
	Checkpoints []Checkpoint `json:"checkpoints"` // of any state, in the order in which they were begun
	Restores    []Restore    `json:"restores"`    // loads by the run
	Decisions   []Decision   `json:"decisions"`   // in the order of the log
	Access      []Access     `json:"access"`      // to the store, in the order of the log

	Keys       []audit.Grant         `json:"keys"`       // that sign decisions, by the log
	Signatures audit.SignatureReport `json:"signatures"` // of the decisions of the run, and of those about keys
}

// Head is a signed head of the log. The report does not compute its root from the log.
type Head struct {
	Origin string `json:"origin"`
	Size   uint64 `json:"size"` // events
	Root   string `json:"root"`
}

// By is who appended an event.
type By struct {
	Principal string `json:"principal,omitempty"` // as the owner of the store identified the sender; empty: the owner's own process, or a server that does not identify senders
	Source    string `json:"source"`              // the program, as it names itself
}

// Job is a launch of a trainer.
type Job struct {
	ID       string    `json:"id"`
	By       By        `json:"by"`
	Host     string    `json:"host"`
	PID      int       `json:"pid"`
	Command  []string  `json:"command"` // without secrets, as the log has it
	Flags    []string  `json:"flags"`
	Resume   string    `json:"resume"`
	NProc    int       `json:"nproc"`
	NNodes   int       `json:"nnodes"`
	Sequence uint64    `json:"sequence"`
	Started  time.Time `json:"started_at"`
	EndedSeq uint64    `json:"ended_sequence,omitempty"` // 0: it has no end in the log
	Ended    time.Time `json:"ended_at,omitzero"`
	ExitCode int       `json:"exit_code"`
	Reason   string    `json:"reason,omitempty"`
}

// Trial is a configuration of the run.
type Trial struct {
	Name     string         `json:"name"`
	Status   string         `json:"status"`
	Message  string         `json:"message,omitempty"`
	Sequence uint64         `json:"sequence"` // of its first event
	Created  time.Time      `json:"created_at"`
	Config   map[string]any `json:"config"`
	Parent   string         `json:"parent,omitempty"` // RUN/TRIAL@ID that it was forked from
	Head     string         `json:"head,omitempty"`   // newest checkpoint of its line
	Reports  int            `json:"reports"`          // iterations with a report, along its line
	Attempts []Attempt      `json:"attempts"`
}

// Attempt is a life of a trial's workers.
type Attempt struct {
	Attempt   int       `json:"attempt"`
	Job       string    `json:"job"`
	Sequence  uint64    `json:"sequence"`
	Started   time.Time `json:"started_at"`
	Stopped   time.Time `json:"stopped_at,omitzero"`
	WorldSize int       `json:"world_size"`
	Backend   string    `json:"backend"`
	Resume    string    `json:"resume,omitempty"`
	Reason    string    `json:"reason,omitempty"`
}

// Origin is a checkpoint of another run or program from which a trial continues.
type Origin struct {
	Of       string `json:"of"`                 // RUN/TRIAL
	How      string `json:"how"`                // forked, loaded or imported
	Ref      string `json:"ref,omitempty"`      // RUN/TRIAL@ID; empty: of another program
	State    string `json:"state,omitempty"`    // of that checkpoint
	Manifest string `json:"manifest,omitempty"` // BLAKE3-256
	Bytes    int64  `json:"bytes,omitempty"`
	Sequence uint64 `json:"sequence,omitempty"` // of its checkpoint.committed
	Job      string `json:"job,omitempty"`      // that imported it
	From     string `json:"from,omitempty"`     // which path, as the job recorded it
	Unknown  string `json:"unknown,omitempty"`  // why the log does not have it
}

// Checkpoint is a save.
type Checkpoint struct {
	Trial      string    `json:"trial"`
	ID         string    `json:"id"`
	Step       int64     `json:"step"`
	Attempt    int       `json:"attempt"`
	WorldSize  int       `json:"world_size"`
	State      string    `json:"state"` // also "superseded": committed, but not in the line
	Parent     string    `json:"parent,omitempty"`
	Manifest   string    `json:"manifest,omitempty"` // BLAKE3-256 of the manifest, which names every byte
	Bytes      int64     `json:"bytes"`
	BegunSeq   uint64    `json:"begun_sequence"`
	Sequence   uint64    `json:"sequence,omitempty"` // of checkpoint.committed
	DeletedSeq uint64    `json:"deleted_sequence,omitempty"`
	Begun      time.Time `json:"begun_at"`
	Ended      time.Time `json:"ended_at,omitzero"`
	Tags       []string  `json:"tags"`
	Pinned     bool      `json:"pinned"`
	Reason     string    `json:"reason,omitempty"`
}

// Restore is a load of a checkpoint.
type Restore struct {
	Trial      string    `json:"trial"`
	Attempt    int       `json:"attempt"`
	Load       int       `json:"load"`
	By         By        `json:"by"`
	Job        string    `json:"job"`
	Checkpoint string    `json:"checkpoint"` // RUN/TRIAL@ID
	Sequence   uint64    `json:"sequence"`
	Begun      time.Time `json:"begun_at"`
	Ended      time.Time `json:"ended_at,omitzero"`
	Outcome    string    `json:"outcome"` // loaded, failed or open
	Bytes      int64     `json:"bytes"`
	Tier       string    `json:"tier,omitempty"`
	Error      string    `json:"error,omitempty"`
}

// Decision is an event that changed the state of a trial.
type Decision struct {
	Sequence uint64    `json:"sequence"`
	Stored   time.Time `json:"stored"` // by the clock of the log's server
	ID       string    `json:"id"`     // of the event
	By       By        `json:"by"`
	Trial    string    `json:"trial"`
	Kind     string    `json:"kind"`
	Subject  string    `json:"subject,omitempty"` // the checkpoint, or the attempt
	Detail   string    `json:"detail,omitempty"`

	Signer    string      `json:"signer,omitempty"` // the key that the signature names: NAME+HASH
	Signature audit.State `json:"signature"`        // whether it holds
}

// Access is a grant of access to the store, or its end.
type Access struct {
	Sequence uint64    `json:"sequence"`
	Stored   time.Time `json:"stored"`
	By       By        `json:"by"`
	Stated   string    `json:"stated,omitempty"` // who it was, as the command named it
	Kind     string    `json:"kind"`             // access.granted or access.revoked
	User     string    `json:"user"`
	Role     string    `json:"role,omitempty"`
	Token    string    `json:"token,omitempty"` // name of the token
	Hashes   []string  `json:"hashes"`          // the first 16 hexadecimal digits of the SHA-256 of the tokens
	Expires  string    `json:"expires,omitempty"`

	Keys    []string `json:"keys,omitempty"`    // that sign decisions, granted or revoked: NAME+HASH
	Runs    []string `json:"runs,omitempty"`    // patterns of the runs that a key may sign
	Require []string `json:"require,omitempty"` // patterns of runs whose decisions must be signed from here on, or no longer
	Signer  string   `json:"signer,omitempty"`  // of a decision about keys, which counts only with a signature
	Invalid string   `json:"invalid,omitempty"` // why it has no effect
}

// Log is the part of a log that a report reads.
type Log interface {
	// ReadLane yields the decisions of an aggregate from a sequence up to another.
	ReadLane(ctx context.Context, agg events.Aggregate, from, until uint64) iter.Seq2[events.Recorded, error]
	// At returns the event at a sequence.
	At(ctx context.Context, seq uint64) (events.Recorded, error)
	// Last returns the sequence of the last event.
	Last(ctx context.Context) (uint64, error)
}

// From is where a report is read.
type From struct {
	Store string // identity
	Log   Log
	Views query.Source                                                // as of now
	AsOf  func(ctx context.Context, seq uint64) (query.Source, error) // as of an event
	// Head returns the newest head, or why there is none. Its signature has been checked.
	Head func() (h *Head, none string, err error)
}

// NoAudit is the reason of [From.Head] for a store without evidence.
const NoAudit = "audit is not configured"

// New reads the report of a run as of a sequence; 0 is the end of the log. It returns
// [projections.ErrNotFound] if the log has no such run or event.
func New(ctx context.Context, from From, run string, asOf uint64) (Report, error) {
	if asOf == 0 {
		// The rows of a live run may be ahead of the lane that was read. Then all is read
		// again, and in the end as of an event, which costs more.
		for range 3 {
			last, err := from.Log.Last(ctx)
			if err != nil {
				return Report{}, err
			}
			r, newest, err := read(ctx, from, from.Views, run, last)
			if err != nil || newest <= last {
				return r, err
			}
			asOf = newest
		}
	}
	views, err := from.AsOf(ctx, asOf)
	if err != nil {
		return Report{}, err
	}
	r, _, err := read(ctx, from, views, run, asOf)
	return r, err
}

// reading is the state of one reading of a report.
type reading struct {
	from   From
	views  query.Source
	r      Report
	newest uint64 // sequence that a row has
	by     map[uint64]By
	signed []events.Recorded // all decisions of the run, and those about keys
}

func read(ctx context.Context, from From, views query.Source, run string, asOf uint64) (Report, uint64, error) {
	x := &reading{from: from, views: views, by: map[uint64]By{}, r: Report{
		Store: from.Store, Run: run, AsOf: asOf,
		Jobs: []Job{}, Trials: []Trial{}, Origins: []Origin{}, Checkpoints: []Checkpoint{}, Restores: []Restore{}, Decisions: []Decision{}, Access: []Access{}, Keys: []audit.Grant{},
	}}
	err := x.read(ctx)
	if err == nil {
		err = x.head()
	}
	return x.r, x.newest, err
}

// head reads the newest head. It comes last: by then a live owner has published more.
func (x *reading) head() error {
	h, none, err := x.from.Head()
	if err != nil {
		return err
	}
	if h == nil {
		x.r.Proven = "no head: " + none
		return nil
	}
	x.r.Head = h
	x.r.Proven = fmt.Sprintf("%s: %d events, root %s", h.Origin, h.Size, h.Root)
	if h.Size < x.r.AsOf {
		x.r.Proven += fmt.Sprintf("; it does not cover events %d to %d", h.Size+1, x.r.AsOf)
	}
	return nil
}

func (x *reading) read(ctx context.Context) error {
	if err := answer.KnownRun(ctx, x.views, x.r.Run); err != nil {
		return err
	}
	end, err := x.from.Log.At(ctx, x.r.AsOf)
	if err != nil {
		return err
	}
	x.r.AsOfStored = end.Stored.UTC()
	if err := x.jobs(ctx); err != nil {
		return err
	}
	trials, err := query.Ask(ctx, x.views, query.Trials, query.Params{Run: x.r.Run})
	if err != nil {
		return err
	}
	// The decisions first: the loads show who decided them.
	for _, t := range trials {
		if err := x.decisions(ctx, t); err != nil {
			return err
		}
	}
	slices.SortFunc(x.r.Decisions, func(a, b Decision) int { return cmp.Compare(a.Sequence, b.Sequence) })
	for _, t := range trials {
		if err := x.trial(ctx, t); err != nil {
			return err
		}
	}
	for _, lane := range []events.Aggregate{{}, {Trial: events.Keys}} {
		if err := x.access(ctx, lane); err != nil {
			return err
		}
	}
	slices.SortStableFunc(x.r.Access, func(a, b Access) int { return cmp.Compare(a.Sequence, b.Sequence) })
	x.signatures()
	slices.SortStableFunc(x.r.Restores, func(a, b Restore) int { return cmp.Compare(a.Sequence, b.Sequence) })
	return x.checkpoints(ctx)
}

// saw notes the sequence of a row.
func (x *reading) saw(seq uint64) { x.newest = max(x.newest, seq) }

func byOf(r events.Recorded) By { return By{Principal: r.Principal, Source: r.Source} }

func (x *reading) jobs(ctx context.Context) error {
	rows, err := query.Ask(ctx, x.views, query.Jobs, query.Params{Run: x.r.Run})
	if err != nil {
		return err
	}
	slices.SortFunc(rows, func(a, b projections.Job) int { return cmp.Compare(a.StartedSeq, b.StartedSeq) })
	for _, j := range rows {
		x.saw(max(j.StartedSeq, j.EndedSeq))
		out := Job{
			ID: j.ID, Host: j.Host, PID: j.PID, Command: listOf(j.Command), Flags: listOf(j.Flags), Resume: j.Resume, NProc: j.NProc, NNodes: j.NNodes,
			Sequence: j.StartedSeq, Started: j.StartedAt.UTC(), EndedSeq: j.EndedSeq, Ended: j.EndedAt.UTC(), ExitCode: j.ExitCode, Reason: j.Reason,
		}
		if j.StartedSeq > 0 {
			started, err := x.from.Log.At(ctx, j.StartedSeq)
			if err != nil {
				return err
			}
			out.By = byOf(started)
		}
		x.r.Jobs = append(x.r.Jobs, out)
	}
	return nil
}

func (x *reading) decisions(ctx context.Context, t projections.Trial) error {
	x.saw(t.LaneSeq)
	for e, err := range x.from.Log.ReadLane(ctx, events.Aggregate{Run: t.Run, Trial: t.Name}, 1, x.r.AsOf) {
		if err != nil {
			return err
		}
		d := Decision{Sequence: e.Sequence, Stored: e.Stored.UTC(), ID: e.ID, By: byOf(e), Trial: t.Name, Kind: string(e.Kind)}
		body, err := e.Body()
		if err != nil {
			return err
		}
		d.Subject, d.Detail = describe(body)
		if e.Kind == (events.RestoreBegun{}).Kind() {
			x.by[e.Sequence] = d.By
		}
		x.r.Decisions = append(x.r.Decisions, d)
		x.signed = append(x.signed, e)
	}
	return nil
}

// signatures checks the signatures of the decisions that were read.
func (x *reading) signatures() {
	slices.SortFunc(x.signed, func(a, b events.Recorded) int { return cmp.Compare(a.Sequence, b.Sequence) })
	check := audit.NewSignatures(x.from.Store, audit.Policy{})
	verdicts := map[uint64]audit.Verdict{}
	for _, e := range x.signed {
		if v, decides := check.Event(e); decides {
			verdicts[e.Sequence] = v
		}
	}
	for i := range x.r.Decisions {
		d := &x.r.Decisions[i]
		v := verdicts[d.Sequence]
		d.Signer, d.Signature = v.Key, cmp.Or(v.State, audit.Unsigned)
	}
	for i := range x.r.Access {
		a := &x.r.Access[i]
		v := verdicts[a.Sequence]
		a.Signer, a.Invalid = v.Key, v.Problem
	}
	x.r.Keys, x.r.Signatures, x.signed = check.Grants(), check.Report(), nil
}

// access reads who was given access to the store, and who lost it, from a lane of the store.
func (x *reading) access(ctx context.Context, lane events.Aggregate) error {
	for e, err := range x.from.Log.ReadLane(ctx, lane, 1, x.r.AsOf) {
		if err != nil {
			return err
		}
		if lane.Trial == events.Keys {
			x.signed = append(x.signed, e)
		}
		body, err := e.Body()
		if err != nil {
			return err
		}
		a := Access{Sequence: e.Sequence, Stored: e.Stored.UTC(), By: byOf(e), Kind: string(e.Kind)}
		switch b := body.(type) {
		case *events.AccessGranted:
			a.User, a.Role, a.Token, a.Hashes, a.Expires, a.Stated = b.User, b.Role, b.Token, []string{b.Hash}, b.Expires, b.By
			if b.Hash == "" {
				a.Hashes = []string{}
			}
			if b.Key != "" {
				a.Keys = []string{audit.KeyOf(b.Key)}
			}
			a.Runs, a.Require = b.Runs, b.Require
		case *events.AccessRevoked:
			a.User, a.Hashes, a.Stated = b.User, listOf(b.Hashes), b.By
			a.Keys, a.Require = b.Keys, b.Require
		default:
			continue
		}
		x.r.Access = append(x.r.Access, a)
	}
	return nil
}

func (x *reading) trial(ctx context.Context, t projections.Trial) error {
	out := Trial{
		Name: t.Name, Status: string(t.Status), Message: t.Message, Sequence: t.CreatedSeq, Created: t.CreatedAt.UTC(),
		Config: t.Config, Head: t.Head, Reports: t.Iterations, Attempts: []Attempt{},
	}
	if out.Config == nil {
		out.Config = map[string]any{}
	}
	if p := t.Parent; p != nil {
		out.Parent = events.CheckpointRef(*p).String()
	}
	if err := x.origins(ctx, t); err != nil {
		return err
	}
	attempts, err := query.Ask(ctx, x.views, query.Attempts, query.Params{Run: t.Run, Trial: t.Name})
	if err != nil {
		return err
	}
	for _, a := range attempts {
		out.Attempts = append(out.Attempts, Attempt{
			Attempt: a.Attempt, Job: a.Job, Sequence: a.StartedSeq, Started: a.StartedAt.UTC(), Stopped: a.StoppedAt.UTC(),
			WorldSize: a.WorldSize, Backend: a.Backend, Resume: a.Resume, Reason: a.Reason,
		})
		if a.Backend == session.ImportBackend {
			x.r.Origins = append(x.r.Origins, Origin{Of: t.Run + "/" + t.Name, How: "imported", Sequence: a.StartedSeq, Job: a.Job, From: a.Reason})
		}
		if err := x.restores(ctx, t, a); err != nil {
			return err
		}
	}
	x.r.Trials = append(x.r.Trials, out)
	return nil
}

func (x *reading) restores(ctx context.Context, t projections.Trial, a projections.Attempt) error {
	loads, err := query.Ask(ctx, x.views, query.Restores, query.Params{Run: t.Run, Trial: t.Name, Attempt: a.Attempt})
	if err != nil {
		return err
	}
	for _, l := range loads {
		x.saw(max(l.BegunSeq, l.EndedSeq))
		ref, other := answer.LoadedFrom(t.Run, t.Name, l)
		out := Restore{
			Trial: t.Name, Attempt: a.Attempt, Load: l.Load, By: x.by[l.BegunSeq], Job: a.Job, Checkpoint: ref.String(),
			Sequence: l.BegunSeq, Begun: l.BegunAt.UTC(), Ended: l.EndedAt.UTC(), Bytes: l.Bytes, Tier: l.Tier, Error: l.Error, Outcome: "loaded",
		}
		switch {
		case l.EndedSeq == 0:
			out.Outcome = "open"
		case l.Error != "":
			out.Outcome = "failed"
		}
		x.r.Restores = append(x.r.Restores, out)
		forked := t.Parent != nil && events.CheckpointRef(*t.Parent) == ref
		known := slices.ContainsFunc(x.r.Origins, func(o Origin) bool { return o.Ref == ref.String() && o.Of == t.Run+"/"+t.Name })
		if other && !forked && !known {
			if _, err := x.origin(ctx, t.Run+"/"+t.Name, "loaded", ref); err != nil {
				return err
			}
		}
	}
	return nil
}

// maxForks bounds the length of a chain of forks in a report.
const maxForks = 1000

// origins follows the forks from a trial back to the first.
func (x *reading) origins(ctx context.Context, t projections.Trial) error {
	for range maxForks {
		if t.Parent == nil {
			return nil
		}
		ref := events.CheckpointRef(*t.Parent)
		found, err := x.origin(ctx, t.Run+"/"+t.Name, "forked", ref)
		if err != nil || !found {
			return err
		}
		if t, err = query.Ask(ctx, x.views, query.Trial, query.Params{Run: ref.Run, Trial: ref.Trial}); err != nil {
			return err
		}
	}
	return nil
}

// origin adds a checkpoint of another trial, and reports whether the log has it.
func (x *reading) origin(ctx context.Context, of, how string, ref events.CheckpointRef) (found bool, err error) {
	o := Origin{Of: of, How: how, Ref: ref.String()}
	c, err := answer.ResolveRef(ctx, x.views, ref)
	switch {
	case errors.Is(err, projections.ErrNotFound), errors.Is(err, events.ErrNewer):
		o.Unknown = err.Error()
	case err != nil:
		return false, err
	default:
		o.State, o.Manifest, o.Bytes, o.Sequence, found = stateOf(c), c.Manifest, c.Bytes, c.CommittedSeq, true
	}
	x.r.Origins = append(x.r.Origins, o)
	return found, nil
}

func stateOf(c projections.Checkpoint) string {
	if c.State == projections.Committed && c.Superseded {
		return "superseded"
	}
	return string(c.State)
}

func (x *reading) checkpoints(ctx context.Context) error {
	rows, err := query.Ask(ctx, x.views, query.Checkpoints, query.Params{Run: x.r.Run, All: true})
	if err != nil {
		return err
	}
	slices.SortFunc(rows, func(a, b projections.Checkpoint) int { return cmp.Compare(a.BegunSeq, b.BegunSeq) })
	for _, c := range rows {
		x.saw(max(c.BegunSeq, c.CommittedSeq, c.DeletedSeq))
		x.r.Checkpoints = append(x.r.Checkpoints, Checkpoint{
			Trial: c.Trial, ID: c.ID, Step: c.Step, Attempt: c.Attempt, WorldSize: c.WorldSize, State: stateOf(c), Parent: c.Parent,
			Manifest: c.Manifest, Bytes: c.Bytes, BegunSeq: c.BegunSeq, Sequence: c.CommittedSeq, DeletedSeq: c.DeletedSeq,
			Begun: c.BegunAt.UTC(), Ended: c.EndedAt.UTC(), Tags: listOf(c.Tags), Pinned: c.Pinned, Reason: c.Reason,
		})
	}
	return nil
}

func listOf(list []string) []string {
	if list == nil {
		return []string{}
	}
	return list
}
