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
	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/durable"
)

const (
	// scrubAfter is when a process first reads the whole log after it became the owner.
	// Shorter commands do not read it.
	scrubAfter = time.Minute
	// scrubEvery is the interval between readings.
	scrubEvery = 6 * time.Hour
	// scrubRate limits the bytes read a second, so that a training does not notice.
	scrubRate = 8 << 20
	// scrubStep is the number of bytes read between two pauses.
	scrubStep = 1 << 18
)

// scrubber reads the whole log in the background while this process owns the store. It exists
// because a server skips a damaged block and reports itself healthy, and the views read each event
// only once, when it is new. It then checks all receipts against the log, and repairs missing and
// damaged ones.
type scrubber struct {
	store   *Store
	settled time.Duration // minimum age of the ended checkpoints that it repairs
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

// pass reads the log once and logs the findings.
func (b *scrubber) pass(ctx context.Context) {
	p := stepped{pacer: pacer{rate: scrubRate}}
	out, err := b.store.readLog(ctx, p.pace, p.pace)
	log := b.store.opts.Logger
	switch {
	case ctx.Err() != nil:
	case err != nil:
		log.Warn("background reading of the log incomplete; retrying", "read", out.Events, "error", err)
	case len(out.Findings) > 0:
		first := []any{slog.Int("findings", len(out.Findings)), slog.String("first", out.Findings[0].String())}
		log.Error("the log is damaged: end all trainings, keep the directory as it is, and run `ckptstore verify --log`", first...)
	default:
		log.Debug("log read completely", "events", out.Events)
		b.repair(ctx, p.pace)
	}
}

// repair does for all checkpoints what a new owner does for the latest ones. It skips checkpoints
// that ended a moment ago, whose processes may still be at work.
func (b *scrubber) repair(ctx context.Context, pace func(context.Context, int64) error) {
	own := b.store.owner.ownership()
	if own == nil {
		return
	}
	err := repairAll(ctx, b.store, b.store.Log, own.views.View, b.settled, pace)
	if err != nil && ctx.Err() == nil {
		b.store.opts.Logger.Warn("receipts not repaired in the background; retrying", "error", err)
	}
}

// stepped is a pacer that pauses rarely: a pause for each event would take longer than the event.
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

// ReadLog is the outcome of a reading of the whole log.
type ReadLog struct {
	Events    uint64 `json:"events"` // events read
	First     uint64 `json:"first"`
	Last      uint64 `json:"last"`
	Decisions uint64 `json:"decisions"`
	Repeated  uint64 `json:"repeated"` // events with the ID of an earlier one, such as facts that a late retry stored again: harmless
	Blobs     uint64 `json:"blobs"`    // claim checks compared with their digests

	Signed uint64 `json:"signed,omitempty"` // decisions with a signature of a key that the log grants

	// Voids are the messages that are not events, the first thousand. VoidCount is their total,
	// and Unrecorded the number that no owner has recorded.
	Voids      []LogVoid `json:"voids,omitempty"`
	VoidCount  int       `json:"void_count,omitempty"`
	Unrecorded int       `json:"unrecorded,omitempty"`
	// Newer counts the events of a newer version, whose content was not checked.
	Newer uint64 `json:"newer,omitempty"`

	Findings []LogFinding `json:"-"`
}

// LogVoid is a message of the log that is not an event.
type LogVoid struct {
	Sequence uint64 `json:"sequence"`
	events.Void
	RecordedSeq uint64 `json:"recorded_seq,omitempty"` // sequence of the owner's log.voided; 0: none
}

// LogFinding is a defect of the log, or of a blob that it names.
type LogFinding struct {
	Sequence uint64 `json:"sequence,omitempty"` // absent: the log as a whole
	Until    uint64 `json:"until,omitempty"`    // the last event affected
	Problem  string `json:"problem"`
	// Aside reports that no event is lost: the finding is about a blob that events name, which any
	// client can invent, or about a cursor or a lease.
	Aside bool `json:"aside,omitempty"`
}

// String formats the finding for users.
func (f LogFinding) String() string {
	return jetlog.Finding(f).String()
}

// VerifyLog reads every event of the log, as [jetlog.Log.Check] does, every blob that an event
// names, and every receipt, which must name an event of the log. It stores the outcome for
// `views status`, unless the store was opened to read. It calls progress, if not nil, with the
// number of events read so far.
func (s *Store) VerifyLog(ctx context.Context, progress func(events uint64)) (ReadLog, error) {
	seen := uint64(0)
	return s.readLog(ctx, func(context.Context, int64) error {
		if seen++; progress != nil {
			progress(seen)
		}
		return nil
	}, unpaced)
}

// readLog calls pace for each event, and pauses for each receipt.
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
	signed := audit.NewSignatures(s.ID, audit.Policy{})
	checked, err := s.Log.Check(ctx, jetlog.CheckOptions{
		Pace: pace, Dir: s.checkDir(),
		Each: func(e events.Recorded) (problems []string) {
			receipts.see(e)
			// A signature that does not hold damages no event: a user who can append to the
			// log could otherwise keep the store from being opened.
			signed.Event(e)
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
	marks := signed.Report()
	for _, f := range marks.Findings {
		lost = withBlob(lost, f.Sequence, f.Problem)
	}
	if marks.More > 0 {
		lost = append(lost, LogFinding{Problem: fmt.Sprintf("%d more decisions have signatures that do not hold", marks.More), Aside: true})
	}
	out := ReadLog{
		Events: checked.Events, First: checked.First, Last: checked.Last,
		Decisions: checked.Decisions, Repeated: checked.Repeated, Blobs: uint64(len(blobs.good) + len(blobs.bad)), Newer: newer,
		Signed: uint64(marks.Signed), //nolint:gosec // not negative
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

// withBlob adds a finding about a blob or a signature. It merges findings of consecutive events.
func withBlob(lost []LogFinding, seq uint64, problem string) []LogFinding {
	if n := len(lost); n > 0 && lost[n-1].Until+1 == seq && lost[n-1].Problem == problem {
		lost[n-1].Until = seq
		return lost
	}
	return append(lost, LogFinding{Sequence: seq, Until: seq, Problem: problem, Aside: true})
}

// blobsSeen holds the claim checks that were compared with their digests, in a few bytes each.
type blobsSeen struct {
	good map[[16]byte]struct{} // by the first bytes of their digests
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

// checkDir returns the directory to which a reading of the log spills what does not fit in memory.
// The system's temporary directory may itself be in memory.
func (s *Store) checkDir() string {
	if s.opts.Reader || IsURL(s.opts.Location) || unix.Access(s.Location, unix.W_OK) != nil {
		return ""
	}
	return s.Location
}

// blobsOf returns the claim checks of an event.
func blobsOf(body events.Body) []events.Blob {
	var b events.Blob
	switch body := body.(type) {
	case *events.LocalPlan:
		b = body.Plan
	case *events.GlobalPlan:
		b = body.Layout
	case *events.GroupStarted:
		if body.Map != nil {
			b = *body.Map
		}
	}
	if b.Digest == "" {
		return nil
	}
	return []events.Blob{b}
}

// FullRead records the last complete reading of the log without a finding, and later findings.
// STORE/read.json holds it.
type FullRead struct {
	Sequence uint64     `json:"sequence"`         // of the last event read; 0 before the first reading
	At       time.Time  `json:"at"`               // end of that reading
	Damage   *LogDamage `json:"damage,omitempty"` // nil: none
}

// LogDamage holds the findings of the newest reading.
type LogDamage struct {
	At       time.Time    `json:"at"`
	Findings []LogFinding `json:"findings"`
}

const readName = "read.json"

// LastFullRead returns the record of the last full reading; found is false before the first one.
func (s *Store) LastFullRead() (r FullRead, found bool, err error) {
	if s.local != nil {
		return r, false, nil // a server's store has no local directory
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

// noteReadLog records the outcome of a reading of the log. Findings stay until a reading has
// none.
func noteReadLog(dir string, out ReadLog) error {
	r, _, err := lastFullRead(dir)
	if err != nil {
		r = FullRead{} // write a new record
	}
	if now := time.Now().UTC(); len(out.Findings) == 0 {
		r = FullRead{Sequence: max(r.Sequence, out.Last), At: now}
	} else {
		r.Damage = &LogDamage{At: now, Findings: out.Findings}
	}
	return writeFullRead(dir, r)
}

// noteFullRead records that the views were folded from the whole log, which reads every event but
// does none of the other checks of [Store.VerifyLog].
func noteFullRead(dir string, seq uint64) error {
	r, _, err := lastFullRead(dir)
	if err != nil {
		r = FullRead{}
	}
	// Events that were read once did exist.
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

// voidsListed limits the messages that a reading of the log lists as not being events.
const voidsListed = 1000

// voidsSeen holds the messages of a log that are not events, and the owner's records of them: a few
// bytes each.
type voidsSeen struct {
	list     []LogVoid         // the first ones
	digests  map[uint64]string // of all, by sequence
	recorded map[uint64]uint64 // the decisions about them, by sequence
}

// see processes one event. A record of a message counts only if it is true: a client of the log's
// server, or an older version, may have written a false one.
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

// tell adds the messages to the outcome.
func (v *voidsSeen) tell(out *ReadLog) {
	out.Voids, out.VoidCount, out.Unrecorded = v.list, len(v.digests), len(v.digests)-len(v.recorded)
	for i := range out.Voids {
		out.Voids[i].RecordedSeq = v.recorded[out.Voids[i].Sequence]
	}
}
