package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/durable"
)

const (
	// scrubAfter is how long after it began to own a store a process first
	// reads the whole log; commands that end sooner do not.
	scrubAfter = time.Minute
	// scrubEvery is how often it reads it again.
	scrubEvery = 6 * time.Hour
	// scrubRate is how many bytes a second it reads at most, so that a
	// training does not notice.
	scrubRate = 8 << 20
	// scrubStep is how many bytes are read between two pauses.
	scrubStep = 1 << 18
)

// scrubber reads the whole log in the background while this process owns the
// store: a server jumps over a damaged block and calls itself healthy, and the
// views read each event once, when it is new. Then it compares all receipts with
// the log, and repairs those that are missing or damaged.
type scrubber struct {
	store   *Store
	settled time.Duration // since when what it repairs has ended
	cancel  context.CancelFunc
	done    chan struct{}
}

func startScrubber(s *Store, after, every time.Duration) *scrubber {
	ctx, cancel := context.WithCancel(context.Background())
	b := &scrubber{store: s, settled: settleLong, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(b.done)
		for wait := after; sleep(ctx, wait); {
			if wait = after; s.Owns() {
				b.pass(ctx)
				wait = every
			}
		}
	}()
	return b
}

func (b *scrubber) stop() {
	b.cancel()
	<-b.done
}

// pass reads the log once and says what is wrong with it.
func (b *scrubber) pass(ctx context.Context) {
	p := stepped{pacer: pacer{rate: scrubRate}}
	out, err := b.store.readLog(ctx, p.pace, p.pace)
	log := b.store.opts.Logger
	switch {
	case ctx.Err() != nil:
	case err != nil:
		log.Warn("the log could not be read to its end in the background; it is tried again", "read", out.Events, "error", err)
	case len(out.Findings) > 0:
		first := []any{slog.Int("findings", len(out.Findings)), slog.String("first", out.Findings[0].String())}
		log.Error("the log is damaged: end all trainings, keep the directory as it is, and run `ckptstore verify --log`", first...)
	default:
		log.Debug("the whole log was read", "events", out.Events)
		b.repair(ctx, p.pace)
	}
}

// repair does for all checkpoints what an owner does when it takes over for
// those that were decided last. What has ended a moment ago is left to those who
// are at it.
func (b *scrubber) repair(ctx context.Context, pace func(context.Context, int64) error) {
	own := b.store.owner.ownership()
	if own == nil {
		return
	}
	err := repairAll(ctx, b.store, b.store.Log, own.views.db.View, b.settled, pace)
	if err != nil && ctx.Err() == nil {
		b.store.opts.Logger.Warn("receipts could not be repaired in the background; it is tried again", "error", err)
	}
}

// stepped is a pacer that pauses rarely: a pause for each event would take
// longer than the event.
type stepped struct {
	pacer
	mu    sync.Mutex
	owing int64
}

func (s *stepped) pace(ctx context.Context, bytes int64) error {
	s.mu.Lock()
	s.owing += bytes
	owing := s.owing
	if owing >= scrubStep {
		s.owing = 0
	}
	s.mu.Unlock()
	if owing < scrubStep {
		return ctx.Err()
	}
	return s.pacer.pace(ctx, owing)
}

// ReadLog is the outcome of reading a whole log.
type ReadLog struct {
	Events    uint64 `json:"events"` // that were read
	First     uint64 `json:"first"`
	Last      uint64 `json:"last"`
	Decisions uint64 `json:"decisions"`
	Repeated  uint64 `json:"repeated"` // whose ID an earlier one has, such as facts that a late retry has stored again: harmless
	Blobs     uint64 `json:"blobs"`    // claim checks that were compared with their digests

	// Voids are the messages that are no events, the first thousand; VoidCount is how
	// many there are, and Unrecorded how many of them no owner has recorded.
	Voids      []LogVoid `json:"voids,omitempty"`
	VoidCount  int       `json:"void_count,omitempty"`
	Unrecorded int       `json:"unrecorded,omitempty"`
	// Newer counts the events of a newer version: what they say was not looked at.
	Newer uint64 `json:"newer,omitempty"`

	Findings []LogFinding `json:"-"`
}

// LogVoid is a message of the log that is no event.
type LogVoid struct {
	Sequence uint64 `json:"sequence"`
	events.Void
	RecordedSeq uint64 `json:"recorded_seq,omitempty"` // of the owner's log.voided; 0: none
}

// LogFinding is something in the log, or in a blob that it names, that should
// not be.
type LogFinding struct {
	Sequence uint64 `json:"sequence,omitempty"` // absent: the log as a whole
	Until    uint64 `json:"until,omitempty"`    // the last event that is meant
	Problem  string `json:"problem"`
	// Aside says that no event is lost: it is about a blob which the events name, and
	// any client can name one that never was, or about a cursor or a lease.
	Aside bool `json:"aside,omitempty"`
}

// String is the finding for people.
func (f LogFinding) String() string {
	return jetlog.Finding(f).String()
}

// VerifyLog reads every event of the log, as [jetlog.Log.Check] does, every
// blob that one names, and every receipt, which must name an event of it. It keeps
// the outcome for `views status`, unless the store was opened to read. progress, if
// not nil, is called with the number of events read so far.
func (s *Store) VerifyLog(ctx context.Context, progress func(events uint64)) (ReadLog, error) {
	seen := uint64(0)
	return s.readLog(ctx, func(context.Context, int64) error {
		if seen++; progress != nil {
			progress(seen)
		}
		return nil
	}, unpaced)
}

// readLog tells pace of each event, and pauses of each receipt.
func (s *Store) readLog(ctx context.Context, pace, pauses func(context.Context, int64) error) (ReadLog, error) {
	files, err := s.logFiles()
	if err != nil {
		return ReadLog{}, err
	}
	receipts, err := listReceipts(ctx, s, pauses)
	if err != nil {
		return ReadLog{}, err
	}
	blobs := blobsSeen{good: map[[16]byte]struct{}{}, bad: map[string]error{}}
	voids := voidsSeen{recorded: map[uint64]uint64{}, digests: map[uint64]string{}}
	newer := uint64(0)
	var lost []LogFinding
	checked, err := s.Log.Check(ctx, jetlog.CheckOptions{
		Pace: pace, Dir: s.checkDir(),
		Each: func(e events.Recorded) (problems []string) {
			receipts.see(e)
			body, err := e.Body()
			switch {
			case errors.Is(err, events.ErrNewer):
				newer++
				return nil
			case err != nil:
				return []string{err.Error()}
			}
			voids.see(e, body)
			for _, b := range blobsOf(body) {
				if err := blobs.look(ctx, s, b); err != nil {
					lost = withBlob(lost, e.Sequence, err.Error())
				}
			}
			return nil
		},
	})
	out := ReadLog{
		Events: checked.Events, First: checked.First, Last: checked.Last,
		Decisions: checked.Decisions, Repeated: checked.Repeated, Blobs: uint64(len(blobs.good) + len(blobs.bad)), Newer: newer,
	}
	for _, f := range checked.Findings {
		out.Findings = append(out.Findings, LogFinding(f))
	}
	out.Findings = append(out.Findings, lost...)
	voids.tell(&out)
	if err == nil {
		var denied []LogFinding
		denied, err = receipts.findings(ctx, s, checked.Last)
		out.Findings = append(out.Findings, denied...)
	}
	if err == nil {
		var missing []LogFinding
		missing, err = s.onDisk(files)
		out.Findings = append(out.Findings, missing...)
	}
	if err == nil && s.local == nil && !s.opts.Reader {
		err = noteReadLog(s.Location, out)
	}
	return out, err
}

// withBlob adds a finding about a blob. Those of the events that follow each other are
// one.
func withBlob(lost []LogFinding, seq uint64, problem string) []LogFinding {
	if n := len(lost); n > 0 && lost[n-1].Until+1 == seq && lost[n-1].Problem == problem {
		lost[n-1].Until = seq
		return lost
	}
	return append(lost, LogFinding{Sequence: seq, Until: seq, Problem: problem, Aside: true})
}

// blobsSeen are the claim checks that were compared with their digests, in a few
// bytes each.
type blobsSeen struct {
	good map[[16]byte]struct{} // by what their digests begin with
	bad  map[string]error
}

func (seen *blobsSeen) look(ctx context.Context, s *Store, b events.Blob) error {
	var key [16]byte
	digest, err := checkpoint.ParseDigest(b.Digest)
	if err == nil {
		key = [16]byte(digest[:16])
		if _, known := seen.good[key]; known {
			return nil
		}
	}
	if err, known := seen.bad[b.Digest]; known {
		return err
	}
	if _, err = s.Blobs.Get(ctx, b); err != nil {
		seen.bad[b.Digest] = err
		return err
	}
	seen.good[key] = struct{}{}
	return nil
}

// checkDir is where a reading of the log spills what it cannot keep in memory:
// temporary files of the system may be in memory.
func (s *Store) checkDir() string {
	if s.opts.Reader || IsURL(s.opts.Location) || unix.Access(s.Location, unix.W_OK) != nil {
		return ""
	}
	return s.Location
}

// blobsOf are the claim checks of an event.
func blobsOf(body events.Body) []events.Blob {
	var b events.Blob
	switch body := body.(type) {
	case *events.LocalPlan:
		b = body.Plan
	case *events.GlobalPlan:
		b = body.Layout
	}
	if b.Digest == "" {
		return nil
	}
	return []events.Blob{b}
}

// FullRead is the last time that the log was read from its first event to its
// end without a finding, and what was found since. STORE/read.json holds it.
type FullRead struct {
	Sequence uint64     `json:"sequence"`         // of the last event that was read; 0 before the first time
	At       time.Time  `json:"at"`               // when that ended
	Damage   *LogDamage `json:"damage,omitempty"` // nil: nothing
}

// LogDamage is what the newest reading has found.
type LogDamage struct {
	At       time.Time    `json:"at"`
	Findings []LogFinding `json:"findings"`
}

const readName = "read.json"

// LastFullRead is found false before the first.
func (s *Store) LastFullRead() (r FullRead, found bool, err error) {
	if s.local != nil {
		return r, false, nil // a server's store has no directory of ours
	}
	return lastFullRead(s.Location)
}

func lastFullRead(dir string) (r FullRead, found bool, err error) {
	path := filepath.Join(dir, readName)
	text, err := readFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return r, false, nil
	}
	if err == nil {
		err = json.Unmarshal(text, &r)
	}
	if err != nil {
		return r, false, fmt.Errorf("when the log was last read: %w: delete %s, it is written by the next `ckptstore verify --log`", err, path)
	}
	return r, true, nil
}

// noteReadLog keeps the outcome of reading the log. What was found stays until
// a reading finds nothing.
func noteReadLog(dir string, out ReadLog) error {
	r, _, err := lastFullRead(dir)
	if err != nil {
		r = FullRead{} // it is written anew
	}
	if now := time.Now().UTC(); len(out.Findings) == 0 {
		r = FullRead{Sequence: max(r.Sequence, out.Last), At: now}
	} else {
		r.Damage = &LogDamage{At: now, Findings: out.Findings}
	}
	return writeFullRead(dir, r)
}

// noteFullRead keeps that the views were folded from the whole log, which reads
// every event but not what else [Store.VerifyLog] looks at.
func noteFullRead(dir string, seq uint64) error {
	r, _, err := lastFullRead(dir)
	if err != nil {
		r = FullRead{}
	}
	// What was once read was there.
	r.Sequence, r.At = max(r.Sequence, seq), time.Now().UTC()
	return writeFullRead(dir, r)
}

func writeFullRead(dir string, r FullRead) error {
	text, err := json.Marshal(r)
	if err != nil {
		return err
	}
	return durable.Write(filepath.Join(dir, readName), append(text, '\n'))
}

// voidsListed is how many messages that are no events a reading of the log lists.
const voidsListed = 1000

// voidsSeen are the messages of a log that are no events, and what the owner has
// recorded of them: a few bytes each.
type voidsSeen struct {
	list     []LogVoid         // the first ones
	digests  map[uint64]string // of all, by sequence
	recorded map[uint64]uint64 // the decisions about them, by sequence
}

// see looks at one event. What is recorded of a message counts if it is true of it:
// otherwise a client of the log's server, or an older version, has said it.
func (v *voidsSeen) see(e events.Recorded, body events.Body) {
	switch b := body.(type) {
	case *events.Void:
		v.digests[e.Sequence] = b.Digest
		if len(v.list) < voidsListed {
			v.list = append(v.list, LogVoid{Sequence: e.Sequence, Void: *b})
		}
	case *events.LogVoided:
		digest, void := v.digests[b.Sequence]
		if (events.Aggregate{}).Owns(e.Event) && void && digest == b.Digest && v.recorded[b.Sequence] == 0 {
			v.recorded[b.Sequence] = e.Sequence
		}
	}
}

// tell puts them into the outcome.
func (v *voidsSeen) tell(out *ReadLog) {
	out.Voids, out.VoidCount, out.Unrecorded = v.list, len(v.digests), len(v.digests)-len(v.recorded)
	for i := range out.Voids {
		out.Voids[i].RecordedSeq = v.recorded[out.Voids[i].Sequence]
	}
}
