package data

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"

	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"golang.org/x/sync/errgroup"
)

// Verify reads every byte of a checkpoint and compares the manifest with its digest, the
// receipt with the manifest, every index with the manifest, and every data file with its
// index. It reports all damage, not only the first. The error is for a verification that
// could not be done, or whose context ended. manifest is the digest recorded in the log; if
// zero, Verify takes the receipt's. progress, if not nil, is called with the number of bytes
// digested so far, by one goroutine at a time.
func (r *Root) Verify(ctx context.Context, ref checkpoint.Ref, manifest checkpoint.Digest, progress func(bytes int64)) (Report, error) {
	return r.VerifyWith(ctx, ref, manifest, VerifyOptions{Progress: progress})
}

// VerifyOptions selects how much to verify.
type VerifyOptions struct {
	Progress func(bytes int64) // as in [Root.Verify]; bytes that others have read do not count
	Quick    bool              // receipt, manifest, indexes, and the sizes and headers of files; no chunk
	Sizes    bool              // as Quick, and of data files the sizes alone: none is read
	Together *Together         // shared with parallel verifications; nil: none
}

// VerifyWith is [Root.Verify] with options.
func (r *Root) VerifyWith(ctx context.Context, ref checkpoint.Ref, manifest checkpoint.Digest, o VerifyOptions) (Report, error) {
	return r.verify(ctx, ref, manifest, &verifier{progress: o.Progress, quick: o.Quick || o.Sizes, sizes: o.Sizes, together: o.Together})
}

// LearnOptions holds the options of [Root.Learn].
type LearnOptions struct {
	Progress func(bytes int64) // as in [Root.Verify]
	// Pace, if not nil, is called with the number of bytes read since the last call, by
	// several goroutines. It may block.
	Pace func(ctx context.Context, bytes int64) error
	// Recorded holds the digests of files of sums in the log, by name. The sums learned now
	// must match them.
	Recorded map[string]checkpoint.Digest
	Together *Together // as in [VerifyOptions]
}

// Learn is [Root.Verify] for a checkpoint that may be adopted. It makes newly computed sums
// of adopted bytes durable next to the index, for later readers. It does so for each rank
// whose files match the checksums that the program which wrote them left, if any. The caller
// records [Report.Sums] in the log. It may be repeated.
func (r *Root) Learn(ctx context.Context, ref checkpoint.Ref, manifest checkpoint.Digest, o LearnOptions) (Report, error) {
	return r.verify(ctx, ref, manifest, &verifier{progress: o.Progress, pace: o.Pace, recorded: o.Recorded, learn: true, together: o.Together})
}

func (r *Root) verify(ctx context.Context, ref checkpoint.Ref, manifest checkpoint.Digest, v *verifier) (Report, error) {
	if v.together == nil {
		v.together = r.NewTogether()
	}
	err := errors.Join(ctx.Err(), ref.Validate())
	v.root, v.ref, v.known, v.broken = r, ref, map[string]bool{}, map[int]bool{}
	v.files = checkpointFiles{r, ref}
	if err == nil {
		err = v.run(ctx, manifest)
	}
	if err != nil {
		return Report{}, fmt.Errorf("verify checkpoint %s: %w", ref, err)
	}
	v.sort()
	return v.report, nil
}

func (v *verifier) sort() {
	slices.SortStableFunc(v.report.Findings, func(a, b Finding) int {
		return cmp.Or(cmp.Compare(a.File, b.File), cmp.Compare(a.Offset, b.Offset), cmp.Compare(a.FQN, b.FQN))
	})
}

// verifier collects the report of one verification.
type verifier struct {
	root     *Root
	ref      checkpoint.Ref
	files    opener
	progress func(int64)
	pace     func(context.Context, int64) error
	quick    bool
	sizes    bool // quick, and reads no data file
	together *Together
	learn    bool
	recorded map[string]checkpoint.Digest
	known    map[string]bool // files that are part of the checkpoint

	mu      sync.Mutex
	report  Report
	broken  map[int]bool // ranks whose sums must not be learned
	unknown []*unlearned
}

// unlearned is an adopted index whose sums are not known yet.
type unlearned struct {
	index  *checkpoint.Index
	digest checkpoint.Digest
}

func (v *verifier) find(kind Kind, file, format string, args ...any) {
	v.add(Finding{Kind: kind, File: file, Block: -1, Offset: -1, Problem: fmt.Sprintf(format, args...)})
}

func (v *verifier) add(f Finding) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.report.Findings = append(v.report.Findings, f)
}

func (v *verifier) count(files, chunks int, bytes int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.report.Files += files
	v.report.Chunks += chunks
	v.report.Bytes += bytes
	v.report.Read += bytes
	if bytes > 0 && v.progress != nil {
		v.progress(v.report.Read)
	}
}

// reused counts a chunk that a parallel verification has read.
func (v *verifier) reused(bytes int64) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.report.Chunks++
	v.report.Bytes += bytes
}

// read returns a small file, or adds a finding and returns nil if it cannot be read.
func (v *verifier) read(ctx context.Context, name string) []byte {
	data, err := v.root.readFile(ctx, v.ref, name)
	if err != nil {
		v.findError(name, err)
		return nil
	}
	v.count(1, 0, 0)
	return data
}

func (v *verifier) findError(name string, err error) {
	if errors.Is(err, fs.ErrNotExist) {
		v.find(Missing, name, "the file is not there")
		return
	}
	v.find(Unreadable, name, "%v", err)
}

func (v *verifier) run(ctx context.Context, digest checkpoint.Digest) error {
	names, err := v.root.names(ctx, nameOf(v.ref))
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !errors.As(err, new(*beneath.TypeError)) {
		return err // a link is not followed: each file gives a finding
	}
	receipt := v.receipt(ctx, digest)
	if digest == (checkpoint.Digest{}) && receipt != nil {
		digest = receipt.Manifest
	}
	var g errgroup.Group
	g.SetLimit(v.root.readers())
	if m := v.manifest(ctx, digest, receipt); m != nil {
		items := itemsByRank(m.Layout)
		for _, rank := range m.Ranks {
			v.rank(ctx, &g, rank.Rank, &rank.Index, items[rank.Rank])
			delete(items, rank.Rank)
		}
		for rank := range items {
			v.find(Mismatch, checkpoint.ManifestFile(digest), "the layout has chunks of rank %d, the manifest has no index of it", rank)
		}
	} else {
		// Without a manifest, the files in the directory are checked by themselves.
		for _, name := range names {
			rank := -1
			if _, err := fmt.Sscanf(name, "r%d.idx", &rank); err == nil && rank >= 0 && name == checkpoint.IndexFile(rank) {
				v.rank(ctx, &g, rank, nil, nil)
			}
		}
	}
	if err := g.Wait(); err != nil {
		return err
	}
	if err := ctx.Err(); err != nil {
		return err
	}
	if err := v.writeSums(ctx); err != nil {
		return err
	}
	for _, name := range names {
		if !v.known[name] {
			v.report.Extra = append(v.report.Extra, name)
		}
	}
	slices.Sort(v.report.Extra)
	return nil
}

// receipt checks the receipt by itself and against the digest of the log.
func (v *verifier) receipt(ctx context.Context, digest checkpoint.Digest) *checkpoint.Receipt {
	v.known[checkpoint.ReceiptFile] = true
	data := v.read(ctx, checkpoint.ReceiptFile)
	if data == nil {
		return nil
	}
	receipt, err := checkpoint.DecodeReceipt(data)
	if err != nil {
		v.find(Corrupt, checkpoint.ReceiptFile, "%v", err)
		return nil
	}
	if digest != (checkpoint.Digest{}) && receipt.Manifest != digest {
		v.find(Mismatch, checkpoint.ReceiptFile, "it names manifest %s, the log names %s", receipt.Manifest, digest)
	}
	return &receipt
}

// manifest checks the manifest against its digest, and the receipt against it.
func (v *verifier) manifest(ctx context.Context, digest checkpoint.Digest, receipt *checkpoint.Receipt) *checkpoint.Manifest {
	if digest == (checkpoint.Digest{}) {
		return nil // the receipt, which would name it, gave a finding already
	}
	name := checkpoint.ManifestFile(digest)
	v.known[name] = true
	data := v.read(ctx, name)
	if data == nil {
		return nil
	}
	if got := checkpoint.Sum(data); got != digest {
		v.find(Corrupt, name, "digest of the manifest is %s", got)
		return nil
	}
	m, err := checkpoint.DecodeManifest(data)
	if err != nil {
		v.find(Corrupt, name, "%v", err)
		return nil
	}
	if receipt != nil && receipt.Manifest == digest {
		if err := receipt.Matches(m); err != nil {
			v.find(Mismatch, checkpoint.ReceiptFile, "%v", err)
		}
	}
	return &m
}

// rank checks the index of a rank, and queues the checks of its data. want is its digest and
// items its required contents; both are nil without a manifest.
func (v *verifier) rank(ctx context.Context, g *errgroup.Group, rank int, want *checkpoint.Digest, items []checkpoint.Item) {
	name := checkpoint.IndexFile(rank)
	v.known[name], v.known[checkpoint.DataFile(rank)] = true, true
	data := v.read(ctx, name)
	if data == nil {
		return
	}
	x, err := checkpoint.DecodeIndex(data)
	if want != nil && checkpoint.Sum(data) != *want {
		kind, problem := Mismatch, "it is undamaged, but not the index in the manifest"
		if err != nil {
			kind, problem = Corrupt, err.Error()
		}
		v.find(kind, name, "digest of the index is %s, the manifest records %s: %s", checkpoint.Sum(data), want, problem)
	} else if err != nil {
		v.find(Corrupt, name, "%v", err)
	}
	if err != nil {
		return
	}
	if x.Rank != rank {
		v.find(Mismatch, name, "it is the index of rank %d", x.Rank)
	}
	if want != nil {
		missing, extra := compareItems(&x, items)
		for _, problem := range append(missing, extra...) {
			v.find(Mismatch, name, "%s", problem)
		}
	}
	if x.Adopted() {
		v.known[checkpoint.DataFile(rank)] = false
		v.sums(ctx, &x, checkpoint.Sum(data))
	}
	for i, f := range x.Files {
		if f.From == (checkpoint.Ref{}) {
			v.known[f.Name] = true
		}
		v.data(ctx, g, &x, i)
	}
}

// findingName returns the name of a file in findings.
func findingName(f checkpoint.File) string {
	if f.From == (checkpoint.Ref{}) {
		return f.Name
	}
	return nameOf(f.From, f.Name)
}

// Kind is the kind of damage of a finding.
type Kind string

// The kinds of findings.
const (
	Missing    Kind = "missing"    // a file does not exist
	Truncated  Kind = "truncated"  // a file is shorter than it was written
	Corrupt    Kind = "corrupt"    // bytes differ from those that were written
	Mismatch   Kind = "mismatch"   // two undamaged files do not belong together
	Unreadable Kind = "unreadable" // the filesystem could not read
)

// Finding is one problem of a checkpoint.
type Finding struct {
	Kind    Kind   `json:"kind"`
	File    string `json:"file"`            // within the checkpoint's directory; with run, trial and checkpoint in front if in another's
	FQN     string `json:"fqn,omitempty"`   // affected tensor or value
	Chunk   string `json:"chunk,omitempty"` // box of the affected chunk
	Block   int    `json:"block"`           // 64 KiB block in the chunk; -1 for none
	Offset  int64  `json:"offset"`          // in the file, in bytes; -1 for none
	Problem string `json:"problem"`
}

// String returns the finding in one line.
func (f Finding) String() string {
	var s strings.Builder
	fmt.Fprintf(&s, "%s: %s", f.File, f.Kind)
	if f.FQN != "" {
		fmt.Fprintf(&s, " %q", f.FQN)
	}
	if f.Chunk != "" {
		fmt.Fprintf(&s, " %s", f.Chunk)
	}
	if f.Block >= 0 {
		fmt.Fprintf(&s, " block %d", f.Block)
	}
	if f.Offset >= 0 {
		fmt.Fprintf(&s, " offset %d", f.Offset)
	}
	return s.String() + ": " + f.Problem
}

// Report is the result of a verification.
type Report struct {
	Findings []Finding // sorted by file and offset
	Files    int       // files that were read
	Chunks   int       // chunks and values whose bytes were digested
	Bytes    int64     // of those
	Read     int64     // of Bytes, those not read by a parallel verification: see [Together]
	Extra    []string  // files that the manifest does not name: harmless

	// Sums holds the known sums of adopted files.
	Sums []Sums
	// Unknown counts the chunks and values that could not be compared: their digest is not
	// known, and the program that wrote them left no checksum.
	Unknown int
	// Attested is the size of data files that were not read, and whose checksum, as their
	// server attests it, is that of the index.
	Attested int64

	// BySize is the size of the other data files that were not read.
	BySize int64
}

// Clean reports whether there are no findings.
func (r Report) Clean() bool { return len(r.Findings) == 0 }
