package audit

import (
	"bufio"
	"bytes"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/zeebo/blake3"
	"golang.org/x/mod/sumdb/tlog"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/problem"
)

// What a bundle may lack.
var (
	// ErrMissingEvent reports that an event between others is missing.
	ErrMissingEvent = problem.New(problem.Findings, "event missing")
	// ErrMissingTrial reports that a trial of the run is missing.
	ErrMissingTrial = problem.New(problem.Findings, "trial missing")
	// ErrMissingEnd reports that the last events of a trial are missing.
	ErrMissingEnd = problem.New(problem.Findings, "end of the trial missing")
)

// BundleFormat is the first member of a bundle.
const BundleFormat = "ckptstore-bundle/v1"

// bundleBegin is how a bundle begins.
const bundleBegin = `{"format":"` + BundleFormat + `",`

// A bundle is JSON, one object a line: a [BundleHead], then an [Item] for each event of
// the run from the first to the last that the run map covers. Those of the chosen range
// have their message and the proof of their entry. The others have only their entry,
// which has no body: a verifier refuses content that it did not check.

// BundleHead is the first line of a bundle.
type BundleHead struct {
	Format      string       `json:"format"`
	Run         string       `json:"run"`        // as subjects have it
	From        uint64       `json:"from"`       // events from here
	Until       uint64       `json:"until"`      // to here have their content; at most the size that the run map covers
	Checkpoint  string       `json:"checkpoint"` // the signed note
	Sealed      Item         `json:"sealed"`     // the decision audit.sealed
	Rows        []PlacedRow  `json:"rows"`
	Items       int          `json:"items"` // lines that follow
	Consistency *Consistency `json:"consistency,omitempty"`

	// What the signatures of the decisions are checked with, where the log grants keys: the
	// first event of the log, which names the store, the rows of the run map of no run, and
	// all messages of its trial [events.Keys].
	Created *Item       `json:"created,omitempty"`
	KeyRows []PlacedRow `json:"key_rows,omitempty"`
	Keys    []Item      `json:"keys,omitempty"`
}

// NoRun is how run and trial of an event without them are written in subjects.
const NoRun = "_"

// Item is an event in a bundle.
type Item struct {
	Entry   []byte   `json:"entry"`
	Message *Content `json:"message,omitempty"`
	Salt    []byte   `json:"salt,omitempty"`
	Proof   []Hash   `json:"proof,omitempty"`
	Blob    []byte   `json:"blob,omitempty"` // of a body that is kept aside
}

// Content is the part of a message that its entry binds.
type Content struct {
	Subject string              `json:"subject"`
	Header  map[string][]string `json:"header"`
	Body    []byte              `json:"body"` // as it is stored, which JSON in JSON would not keep
}

// NewItem returns the item of a message, without a proof.
func NewItem(m events.Message, entry []byte, salt Salt) Item {
	header := map[string][]string{}
	for name, values := range m.Header {
		if Bound(name) && len(values) > 0 {
			header[name] = slices.Sorted(slices.Values(values)) // an entry does not bind their order
		}
	}
	return Item{Entry: entry, Salt: salt[:], Message: &Content{Subject: m.Subject, Header: header, Body: m.Data}}
}

// Open checks that the item's message is that of its entry, and returns both.
func (it Item) Open() (Leaf, events.Message, error) {
	leaf, err := ParseEntry(it.Entry)
	if err != nil {
		return leaf, events.Message{}, fmt.Errorf("%w: %w", ErrTampered, err)
	}
	if it.Message == nil || len(it.Salt) != len(Salt{}) {
		return leaf, events.Message{}, fmt.Errorf("%w: event %d has no message", ErrMissingEvent, leaf.Sequence)
	}
	m := events.Message{Subject: it.Message.Subject, Header: it.Message.Header, Data: it.Message.Body}
	if !bytes.Equal(Entry(m, leaf.Sequence, leaf.Stored, Salt(it.Salt)), it.Entry) {
		return leaf, m, fmt.Errorf("%w: the message of event %d is not the one of its entry", ErrTampered, leaf.Sequence)
	}
	if m.Header == nil {
		return leaf, m, fmt.Errorf("%w: event %d has no list of headers", ErrTampered, leaf.Sequence)
	}
	for name, values := range m.Header {
		if !Bound(name) || len(values) == 0 {
			return leaf, m, fmt.Errorf("%w: event %d has the header %s, which nothing proves", ErrTampered, leaf.Sequence, name)
		}
		if !slices.IsSorted(values) {
			return leaf, m, fmt.Errorf("%w: event %d has values of the header %s in an order that nothing proves", ErrTampered, leaf.Sequence, name)
		}
	}
	return leaf, m, nil
}

// bare reports whether the item has nothing but its entry.
func (it Item) bare() bool {
	return it.Message == nil && it.Salt == nil && it.Proof == nil && it.Blob == nil
}

// opened checks that the item's message is in the log of a head, and that a content kept
// aside is what the message names. With whole set, that content must be there.
func (it Item) opened(h Head, whole bool) (Leaf, events.Message, error) {
	leaf, m, err := it.Open()
	if err != nil {
		return leaf, m, err
	}
	if err := it.proved(leaf, h); err != nil {
		return leaf, m, err
	}
	switch claim := Claim(m); {
	case claim.Digest == "" && it.Blob != nil:
		return leaf, m, fmt.Errorf("%w: event %d has a content kept aside that its body does not name", ErrTampered, leaf.Sequence)
	case claim.Digest != "" && (whole || it.Blob != nil):
		if err := blobFits(claim.Digest, it.Blob); err != nil {
			return leaf, m, fmt.Errorf("event %d: %w", leaf.Sequence, err)
		}
	}
	return leaf, m, nil
}

// proved checks that the item's entry is in the log of a head.
func (it Item) proved(leaf Leaf, h Head) error {
	index := int64(leaf.Sequence) - 1 //nolint:gosec // CheckRecord rejects what is beyond the head
	if err := tlog.CheckRecord(it.Proof, h.Size, h.Root, index, EntryHash(it.Entry)); err != nil {
		return fmt.Errorf("%w: event %d is not in the log of the head: %w", ErrTampered, leaf.Sequence, err)
	}
	return nil
}

// Verified is what a bundle proves.
type Verified struct {
	Head     Head   `json:"-"`
	Origin   string `json:"origin"`
	Size     int64  `json:"size"`
	Root     string `json:"root"`
	Run      string `json:"run"`
	Trials   int    `json:"trials"`
	Events   int    `json:"events"`   // of the run, up to Complete
	Messages int    `json:"messages"` // with their content
	Complete int64  `json:"complete"` // the bundle has all events of the run up to this sequence
	Blobs    int    `json:"blobs"`    // contents kept aside that are in the bundle

	// Signatures of the decisions with their content, nil if the bundle has no keys. Its
	// findings are no error of [VerifyBundle].
	Signatures *SignatureReport `json:"signatures"`
	Unchecked  int              `json:"unchecked,omitempty"` // signatures in a bundle without keys

	check *signedBundle
}

// VerifyBundle checks a bundle and returns what it proves. It needs no store, network or
// clock. If old is not nil, the log must continue it. Errors match [ErrTampered],
// [ErrMissingEvent], [ErrMissingTrial], [ErrMissingEnd] or [ErrPolicy]. Of a file that is no
// bundle, the kind of the error is [problem.Invalid].
func VerifyBundle(r io.Reader, p Policy, acceptUnwitnessed bool, old *Head) (v Verified, err error) {
	lines := bufio.NewReaderSize(r, 1<<16)
	if begin, err := lines.Peek(len(bundleBegin)); err != nil && !errors.Is(err, io.EOF) {
		return v, fmt.Errorf("bundle: %w", err)
	} else if string(begin) != bundleBegin {
		return v, problem.Errorf(problem.Invalid, "it is no bundle of this version: want the output of `ckptstore audit export`, which begins with %s", bundleBegin)
	}
	var head BundleHead
	if err := nextLine(lines, &head); err != nil {
		return v, fmt.Errorf("bundle: line 1: %w", err)
	}
	if v.Head, err = p.Open([]byte(head.Checkpoint), acceptUnwitnessed); err != nil {
		return v, err
	}
	v.Origin, v.Size, v.Root, v.Run = v.Head.Origin, v.Head.Size, v.Head.Root.String(), head.Run
	if err := head.Consistency.checkAll(old, v.Head, p.Logs); err != nil {
		return v, err
	}
	sealed, err := OpenSealed(head.Sealed, v.Head)
	if err != nil {
		return v, err
	}
	v.Complete = sealed.Size
	if head.From == 0 || head.From > head.Until || head.Until > uint64(sealed.Size) || head.Items < 0 { //nolint:gosec // not negative
		return v, fmt.Errorf("%w: the bundle names %d events, with content from %d to %d, and the run map covers %d", ErrTampered, head.Items, head.From, head.Until, sealed.Size)
	}
	rows, err := CheckRun(head.Rows, head.Run, sealed.Rows, sealed.Runs)
	if err != nil {
		return v, err
	}
	if len(rows) == 0 {
		return v, fmt.Errorf("%w: the log has no event of run %s", ErrMissingTrial, head.Run)
	}
	v.Trials = len(rows)
	if v.check, err = head.signatures(v.Head, sealed, p); err != nil {
		return v, err
	}
	seen := Runs{}
	last := uint64(0)
	for range head.Items {
		var it Item
		if err := nextLine(lines, &it); err != nil {
			if errors.Is(err, io.EOF) {
				break // the chains tell what is missing
			}
			return v, fmt.Errorf("bundle: event %d of %d: %w", v.Events+1, head.Items, err)
		}
		if last, err = v.item(it, head, last, &seen); err != nil {
			return v, err
		}
	}
	if err := complete(rows, &seen); err != nil {
		return v, err
	}
	if v.Events != head.Items {
		return v, fmt.Errorf("%w: the bundle has %d events, and its first line names %d", ErrTampered, v.Events, head.Items)
	}
	if _, err := lines.ReadByte(); !errors.Is(err, io.EOF) {
		return v, errors.Join(fmt.Errorf("%w: the bundle has more than its %d events", ErrTampered, head.Items), err)
	}
	v.Signatures, v.check = v.check.report(), nil
	return v, nil
}

// item checks one event of the run.
func (v *Verified) item(it Item, head BundleHead, last uint64, seen *Runs) (uint64, error) {
	leaf, err := ParseEntry(it.Entry)
	if err != nil {
		return 0, fmt.Errorf("%w: %w", ErrTampered, err)
	}
	run, _ := Trial(leaf.Subject)
	if run != head.Run || leaf.Sequence <= last {
		return 0, fmt.Errorf("%w: event %d is not the next of run %s", ErrTampered, leaf.Sequence, head.Run)
	}
	if head.From <= leaf.Sequence && leaf.Sequence <= head.Until {
		_, m, err := it.opened(v.Head, true)
		if err != nil {
			return 0, err
		}
		if v.check.message(m, leaf); v.check == nil && len(m.Header[HeaderSignature]) > 0 {
			v.Unchecked++
		}
		if it.Blob != nil {
			v.Blobs++
		}
		v.Messages++
	} else if !it.bare() {
		return 0, fmt.Errorf("%w: event %d has content, and the bundle has that of events %d to %d", ErrTampered, leaf.Sequence, head.From, head.Until)
	} else {
		v.check.pass(leaf)
	}
	seen.Add(leaf.Subject, leaf.Sequence, EntryHash(it.Entry))
	v.Events++
	return leaf.Sequence, nil
}

// Claim returns the claim check in the body of a message; of a body that has all of its
// content, the empty one. See [events.Blob].
func Claim(m events.Message) (none events.Blob) {
	tokens := strings.SplitN(m.Subject, ".", 5) // ckpt, run, trial, actor, kind
	var body struct {
		Plan   events.Blob `json:"plan"`
		Layout events.Blob `json:"layout"`
		Map    events.Blob `json:"map"`
	}
	claim := &body.Plan
	switch events.Kind(tokens[len(tokens)-1]) {
	case events.LocalPlan{}.Kind():
	case events.GlobalPlan{}.Kind():
		claim = &body.Layout
	case events.GroupStarted{}.Kind():
		claim = &body.Map
	default:
		return none
	}
	if json.Unmarshal(m.Data, &body) != nil || claim.Digest == "" {
		return none
	}
	return *claim
}

// blobFits checks a content against its digest.
func blobFits(digest string, blob []byte) error {
	if blob == nil {
		return fmt.Errorf("%w: the content %s, which its body names", ErrMissingEvent, digest)
	}
	if sum := blake3.Sum256(blob); hex.EncodeToString(sum[:]) != digest {
		return fmt.Errorf("%w: its content is not %s, which its body names", ErrTampered, digest)
	}
	return nil
}

// complete compares the chains of a bundle with the run map.
func complete(rows []Row, seen *Runs) error {
	had := map[trialKey]Row{}
	for _, r := range seen.Rows() {
		had[trialKey{r.Run, r.Trial}] = r
	}
	for _, want := range rows {
		k := trialKey{want.Run, want.Trial}
		got, ok := had[k]
		delete(had, k)
		switch {
		case !ok:
			return fmt.Errorf("%w: %s/%s has %d events, the bundle has none", ErrMissingTrial, want.Run, want.Trial, want.Count)
		case got.Last != want.Last:
			return fmt.Errorf("%w: %s/%s ends at event %d, the bundle at event %d", ErrMissingEnd, want.Run, want.Trial, want.Last, got.Last)
		case got.Count != want.Count:
			return fmt.Errorf("%w: %s/%s has %d events, the bundle has %d", ErrMissingEvent, want.Run, want.Trial, want.Count, got.Count)
		case got.Chain != want.Chain:
			return fmt.Errorf("%w: the events of %s/%s are not those of the run map", ErrTampered, want.Run, want.Trial)
		}
	}
	for k := range had {
		return fmt.Errorf("%w: the run map has no trial %s/%s", ErrTampered, k.run, k.trial)
	}
	return nil
}

// SealedMap is the content of a decision audit.sealed, checked.
type SealedMap struct {
	Size int64 // the map covers events 1 to Size
	Root Hash  // of the log at Size
	Rows int64
	Runs Hash // root of the map

	Key      string // that signs the heads of the log
	Previous string // see [events.AuditSealed]
}

// OpenSealed checks the item of a decision audit.sealed against a head.
func OpenSealed(it Item, h Head) (s SealedMap, err error) {
	leaf, m, err := it.opened(h, true)
	if err != nil {
		return s, err
	}
	return ParseSealed(m, leaf.Sequence)
}

// ParseSealed parses a message that is a decision audit.sealed.
func ParseSealed(m events.Message, sequence uint64) (s SealedMap, err error) {
	var body events.AuditSealed
	if m.Subject != events.Subject(events.Scope{Run: events.None, Trial: events.None, Actor: events.Server}, body.Kind()) {
		return s, fmt.Errorf("%w: event %d is no %s", ErrTampered, sequence, body.Kind())
	}
	if err = json.Unmarshal(m.Data, &body); err != nil {
		return s, fmt.Errorf("%w: event %d: %w", ErrTampered, sequence, err)
	}
	s.Size, s.Rows = int64(body.Size), int64(body.Rows) //nolint:gosec // compared below
	root, err1 := hex.DecodeString(body.Root)
	runs, err2 := hex.DecodeString(body.Runs)
	if err1 != nil || err2 != nil || len(root) != len(s.Root) || len(runs) != len(s.Runs) || s.Size < 0 || s.Size >= int64(sequence) { //nolint:gosec // as above
		return s, fmt.Errorf("%w: event %d is malformed", ErrTampered, sequence)
	}
	s.Root, s.Runs, s.Key, s.Previous = Hash(root), Hash(runs), body.Key, body.Previous
	return s, nil
}

// nextLine decodes the next line. Lines have a size that the proof of one event bounds. Its
// error is [io.EOF] if there is none, and matches [ErrTampered] for a line that is cut off
// or malformed.
func nextLine(r *bufio.Reader, into any) error {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		line = append(line, part...)
		switch {
		case err == nil:
			if err := strict(bytes.TrimSuffix(line, []byte("\n")), into); err != nil {
				return fmt.Errorf("%w: %w", ErrTampered, err)
			}
			return nil
		case errors.Is(err, io.EOF) && len(line) > 0:
			return fmt.Errorf("%w: the line is cut off", ErrTampered)
		case !errors.Is(err, bufio.ErrBufferFull):
			return err
		case len(line) > maxLine:
			return fmt.Errorf("%w: the line has more than %d bytes", ErrTampered, maxLine)
		}
	}
}

// strict decodes JSON that has the form in which it was written: each change of a byte is
// noticed, also where it would not change the meaning.
func strict(text []byte, into any) error {
	if err := json.Unmarshal(text, into); err != nil {
		return err
	}
	again, err := json.Marshal(into)
	if err == nil && !bytes.Equal(again, text) {
		err = errors.New("it is not written canonically")
	}
	return err
}

const maxLine = 256 << 20
