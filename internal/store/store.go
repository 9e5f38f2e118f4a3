// Package store opens a store: the log, the views and the data of one directory or one NATS server.
// A process opens it as its owner or as a client of its owner.
//
//	STORE/
//	  store.json     identity and format; renamed into place last
//	  LOCK           flock(2) of the owner
//	  REPAIR         flock(2) of the process that repairs data/, the owner or not
//	  owner.json     the owner, with its sockets and its port
//	  end.json       the log's last known end: the log is at least that long
//	  read.json      how far the log was read, and the findings
//	  log/           the log: the embedded NATS server's streams, and its archive
//	  log.0/ … 2/    the copies of a log that has three, in place of log/: see package logpeers
//	  views/         projections; may be deleted, is rebuilt from the log; in
//	                 memory while its file system fails
//	  blobs/         event bodies that are too large for the log
//	  data/          checkpoints: see package data
//	  logs/          the output of workers
//	  run/           of a store that a group shares: sockets of the owner
//	  audit/         tamper evidence, where it is on: see package ledger
//	  backup.json    of a backup: it is only read; see [Store.Backup]
//
// Every process that opens a directory runs the same loop: take LOCK and own the store, or connect
// to the owner. When the owner goes, one of the connected processes takes LOCK and owns the store
// from then on; the others find it through owner.json. Appends in flight are retried under their
// event IDs.
//
// With a NATS URL there is no owner: every process connects to the server and folds its own views
// in memory. The log's first event records where the data is, and location.json there records whose
// it is:
//
//	DATA/
//	  location.json  identity; without it the directory is not used
//	  REPAIR, blobs/, data/  as above
//
// An owner may listen on TCP ([Options].Listen). Then its directory also has a URL, for machines
// that have it mounted under the same path.
//
// Parts with a narrow interface are packages of their own:
//
//	blobs       event bodies outside the log
//	collection  deletes checkpoints by a policy
//	copier      copies files, for backups and restores
//	holder      whether the process that holds a lease has ended
//	place       a bucket that has the data
//	sockets     runtime directories and the tokens in them
//	space       room on the disk: what is refused first
package store

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/cockroachdb/pebble/v2/vfs"
	"github.com/google/uuid"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/events/jetlog"
	"github.com/ckptstore/ckptstore/internal/audit"
	"github.com/ckptstore/ckptstore/internal/audit/ledger"
	"github.com/ckptstore/ckptstore/internal/beneath"
	"github.com/ckptstore/ckptstore/internal/checkpoint"
	"github.com/ckptstore/ckptstore/internal/data"
	"github.com/ckptstore/ckptstore/internal/logpeers"
	"github.com/ckptstore/ckptstore/internal/object/local"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/signing"
	"github.com/ckptstore/ckptstore/internal/store/blobs"
	"github.com/ckptstore/ckptstore/internal/store/collection"
	"github.com/ckptstore/ckptstore/internal/store/holder"
	"github.com/ckptstore/ckptstore/internal/store/place"
	"github.com/ckptstore/ckptstore/internal/store/sockets"
	"github.com/ckptstore/ckptstore/internal/store/space"
	"github.com/ckptstore/ckptstore/internal/store/views"
	"github.com/ckptstore/ckptstore/projections"
)

// Format is the version of the directory and of the log that this program reads and writes.
const Format = 1

// Errors that decide a command's exit code.
var (
	ErrNoStore = problem.New(problem.NoStore, "no store")
	ErrForeign = problem.New(problem.Foreign, "foreign store")
	ErrNewer   = problem.New(problem.Newer, "store of a newer version")
	ErrDamaged = problem.New(problem.Damage, "damaged store")
	ErrLocked  = problem.New(problem.Locked, "store is locked")
)

// Options configure [Open].
type Options struct {
	// Location is a directory or a nats:// URL.
	Location string
	// Patience is how long to wait for an owner that does not answer;
	// default 10 s.
	Patience time.Duration
	Logger   *slog.Logger // default: discard
	// Reader opens the store for reading: this process repairs, removes, records and appends
	// nothing in it.
	Reader bool
	// LeaveVoids leaves messages of the log that are not events unrecorded, for commands
	// that look for them.
	LeaveVoids bool
	// Signer signs the decisions of this process; nil reads the key that the environment
	// names: see [signing.EnvKey].
	Signer *audit.Signer
	// Access to the server of a URL; nil reads the environment.
	Access *Access
	// Listen, when set, lets clients connect over TCP while this process owns the directory or
	// has a URL's store open. Bound, when set, is called with each address; it must not block.
	// On loopback, a listener without a token or client certificates gets a new token, which
	// clients of this user find: see [sockets.TokenFile].
	Listen *jetlog.Listen
	Bound  func(net.Addr)
	// Owner, when set, connects to the owner of the directory on another machine that
	// shares it, by [Store.DialOwner] there. This process then never takes the lock: on a
	// shared directory, a lock may hold for one machine only.
	Owner func(ctx context.Context, door Door) (net.Conn, error)
	// Served is set where trainers serve the copies of the log. This process then serves
	// none: the nodes of the others may have lost theirs for a while only.
	Served bool

	dir       string                             // of a store whose log has copies: its data is there, wherever that was when the log began
	sharing   bool                               // this process made the token of Listen
	cutting   *cutting                           // default: defaultCutting
	auditStep func(step string, done bool) error // see [ledger.Options]
	views     views.Options                      // their FS and Retry
}

// findSigner reads the key of the environment, unless there is one. A reader decides nothing.
func (o *Options) findSigner(dir string) (err error) {
	if o.Signer == nil && !o.Reader {
		o.Signer, err = signing.FromEnv(dir)
	}
	return err
}

// Store is an open store. Its parts may be used concurrently until Close.
type Store struct {
	ID       string
	Copy     string // name of a backup or a restored store, which shares its ID with another; "" of others
	Location string // for messages: a URL without its password
	Log      *jetlog.Log
	Past     *views.Past // answers as of events of the log
	Data     *data.Root
	Blobs    *blobs.Blobs
	Runtime  string // private directory for sockets of this store
	signs    *signing.Gate
	reread   atomic.Int64 // see [Store.Hashed]
	tiles    ledger.Tiles
	place    string // its name: a copy of a store has its own
	top      string // directory of the store's other files on this machine; "" if there is none

	runtime   *sockets.Held
	formerly  []string     // its identities before it was recovered
	recovered uint64       // where its log ended then
	holder    *ownerRecord // nil in a store of an earlier version
	backup    error        // [ErrBackup] if this is a backup, which is read-only

	bucket    *place.Bucket     // that has the data; nil: it is in a directory
	collected collection.Memory // of the last collection
	opts      Options
	cutting   cutting      // of the log, while this process owns it
	space     *space.Gauge // of the disk that log and data share, in a directory
	owner     *owner       // of a directory; nil with a URL
	study     *learner     // with an owner
	scrub     *scrubber

	term    time.Duration // of leases; 0: [leaseTerm]
	life    context.Context
	end     context.CancelFunc // of life, with Close
	leasing sync.WaitGroup     // pending lease releases, and goroutines that end with life

	witness holder.Witness // of this process, while it holds a lease

	learning sync.Mutex      // one checkpoint at a time
	local    query.Source    // of a URL or of receipts; nil with a directory
	followed *views.Views    // of a URL
	relay    *relay          // of a URL, with Listen
	copies   *logpeers.Local // of the log, that this process serves; nil of others
}

// Views answers queries from the projections. An answer includes at least everything that was in the
// log when the query was made.
func (s *Store) Views() query.Source {
	if s.local != nil {
		return s.local
	}
	return s.owner
}

// Open opens an existing store. It never creates one: see [Init]. It returns [ErrNoStore] if there
// is no store, and [ErrLocked] if the owner does not answer within the patience.
func Open(ctx context.Context, o Options) (*Store, error) {
	if o.Patience == 0 {
		o.Patience = 10 * time.Second
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	location, isURL, err := parseLocation(o.Location)
	if err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	if o.Listen != nil {
		listen, made := sockets.WithToken(*o.Listen)
		o.Listen, o.sharing = &listen, made
	}
	if o.Location = location; isURL {
		if err := o.findSigner(""); err != nil {
			return nil, fmt.Errorf("open store: %w", err)
		}
		return openURL(ctx, o)
	}
	dir, err := filepath.Abs(o.Location)
	if err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	if err := o.findSigner(dir); err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	if logpeers.Replicated(dir) {
		return openPeers(ctx, o, dir)
	}
	s, err := closedStore(dir, o)
	if err != nil {
		return nil, err
	}
	if err := mayOpen(dir); err != nil && canWrite(dir) == nil { // else the lock reports it
		return nil, fmt.Errorf("open store: %w", err)
	}
	if s.backup = backedUp(dir); s.backup != nil {
		if !errors.Is(s.backup, ErrBackup) || o.Listen != nil {
			return nil, fmt.Errorf("open store: %w", s.backup)
		}
	}
	if !o.Reader {
		if err := s.checkBucket(ctx); err != nil {
			return nil, fmt.Errorf("open store %s: %w", dir, err)
		}
	}
	if s.runtime, err = sockets.Hold(s.place); err != nil {
		return nil, fmt.Errorf("open store %s: %w", dir, unusable(err))
	}
	s.Runtime = s.runtime.Path
	s.owner = newOwner(dir, s)
	if err := s.owner.join(ctx); err != nil {
		return nil, errors.Join(err, s.owner.close(), s.runtime.Release())
	}
	s.warnOfDamage()
	if o.Reader || o.Owner != nil {
		return s, nil
	}
	if s.backup == nil {
		s.study = startLearner(s, learnAfter)
	}
	s.scrub = startScrubber(s, scrubAfter, scrubEvery)
	return s, nil
}

// closedStore returns the store of a directory without opening its log.
func closedStore(dir string, o Options) (*Store, error) {
	id, err := readIdentity(dir)
	if err != nil {
		return nil, err
	}
	return closedStoreOf(dir, id, o)
}

// closedStoreOf is closedStore for a directory whose identity is, or will be, id.
func closedStoreOf(dir string, id identity, o Options) (_ *Store, err error) {
	s := &Store{ID: id.Store, Copy: id.Copy, Location: dir, place: id.runtime(), opts: o, holder: id.Owner, formerly: id.Formerly, recovered: id.Recovered, cutting: defaultCutting, signs: signing.NewGate(id.Store, o.Signer)}
	if o.cutting != nil {
		s.cutting = *o.cutting
	} else if s.cutting, err = cuttingByEnv(s.cutting); err != nil {
		return nil, err
	}
	return s, s.openData(dir, id.Data)
}

// openData opens the data of a store: in a bucket, or else in dir, which is "" if this machine
// has no directory of the store.
func (s *Store) openData(dir, bucket string) (err error) {
	s.life, s.end = context.WithCancel(context.Background())
	s.top = dir
	if s.Data, s.Blobs, s.bucket, err = openPlace(dir, bucket, s.opts.Logger); err != nil {
		return err
	}
	s.Data.OfStore(s.ID, s.formerly...)
	s.Data.KeepFree(space.OfSaves)
	s.Data.OnUnverified(func(ref checkpoint.Ref) {
		s.opts.Logger.Warn("adopted files without digests are read unchecked; `ckptstore verify --learn` learns the digests", "checkpoint", ref.String())
	})
	s.space = space.New(s.Dir(), s.Data)
	if s.bucket != nil && dir != "" {
		s.space = space.New(dir, local.New(vfs.Default, dir)) // of the log
	}
	return nil
}

// ballast returns the ballast of a store in a directory.
func (s *Store) ballast() space.Ballast {
	return space.NewBallast(s.Location, s.space, s.opts.Logger)
}

// openPlace opens the data and the blobs of a store.
func openPlace(dir, bucket string, log *slog.Logger) (*data.Root, *blobs.Blobs, *place.Bucket, error) {
	if bucket == "" {
		root, err := data.Open(vfs.Default, filepath.Join(dir, "data"))
		return root, blobs.In(filepath.Join(dir, "blobs")), nil, err
	}
	b, err := place.Open(bucket, log)
	if err != nil {
		return nil, nil, nil, err
	}
	root := data.OpenBucket(b.Data())
	if dir != "" {
		spool, err := data.Open(vfs.Default, filepath.Join(dir, "data"))
		if err != nil {
			return nil, nil, nil, err
		}
		root.Spool(spool)
	}
	return root, blobs.At(b.Blobs()), b, nil
}

// checkBucket checks that the bucket's prefix is this store's. A bucket that cannot be asked
// is reported, and does not keep the log from being read.
func (s *Store) checkBucket(ctx context.Context) error {
	if s.bucket == nil {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, bucketPatience)
	defer cancel()
	text, err := s.bucket.Mark(ctx)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("data location: %w: %s: nothing there identifies it as the data of store %s: the bucket or its %s was removed", ErrForeign, s.bucket.Location(), s.ID, place.MarkName)
	}
	if err != nil {
		s.opts.Logger.Warn("the bucket does not answer: saves and loads fail until it does", "bucket", s.bucket.Location(), "error", err)
		return nil
	}
	var id identity
	if err := json.Unmarshal(text, &id); err != nil || id.Product != product || id.Store != s.ID {
		return fmt.Errorf("data location: %w: %s holds the data of store %q, not of %s", ErrForeign, s.bucket.Location(), id.Store, s.ID)
	}
	return nil
}

// bucketPatience bounds the check of a bucket when a store is opened.
const bucketPatience = 10 * time.Second

// OpenData opens only the data of a store, for reading, without the lock, the log or write
// permission. It works when the log is lost. The location is the store's directory, or the URL of
// the bucket that has its data.
func OpenData(location string) (*data.Root, error) {
	if place.IsBucket(location) {
		root, _, _, err := openPlace("", location, slog.New(slog.DiscardHandler))
		if err != nil {
			return nil, fmt.Errorf("open data: %w", err)
		}
		return root, nil
	}
	_, isURL, err := parseLocation(location)
	if err != nil {
		return nil, fmt.Errorf("open data: %w", err)
	}
	if isURL {
		return nil, fmt.Errorf("%w: %s is a server: give the directory of the store's data", ErrLocation, jetlog.Redacted(location))
	}
	if err := unfinished(location); err != nil {
		return nil, fmt.Errorf("open data: %w", err)
	}
	if id, err := identityIn(location); err == nil && id.Data != "" {
		return OpenData(id.Data)
	}
	dir := filepath.Join(location, "data")
	_, err = beneath.At(location).Stat(dir)
	if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) {
		return nil, fmt.Errorf("%w in %s: %w: name another with --store", ErrNoStore, location, err)
	}
	if err != nil {
		return nil, fmt.Errorf("open data: %w", err)
	}
	return data.Open(vfs.Default, dir)
}

// Close releases the store; another process may own it next. A disk that does not answer delays it
// for 50 s at most. Close then returns an error, and the lock is held until the process ends.
func (s *Store) Close() error {
	s.end()
	s.leasing.Wait()
	if s.Log == nil && s.local != nil { // see [OpenByReceipts]
		return s.closeBucket()
	}
	if s.local != nil {
		var ended error
		if s.relay != nil {
			ended = s.relay.close()
		}
		err := s.followed.Close()
		s.Log.Close()
		if s.copies != nil {
			s.copies.Close()
		}
		return errors.Join(ended, err, s.closeBucket(), s.witness.Close(), s.runtime.Release())
	}
	return errors.Join(s.owner.close(), s.closeBucket(), s.witness.Close(), s.runtime.Release())
}

func (s *Store) closeBucket() error {
	if s.bucket == nil {
		return nil
	}
	return s.bucket.Close()
}

// checkLog opens the log of l and checks that it has the store's identity.
func checkLog(ctx context.Context, l *jetlog.Log, want string) error {
	created, _, err := l.Open(ctx)
	switch {
	case errors.Is(err, jetlog.ErrNoLog):
		return fmt.Errorf("%w: its log holds no event: `ckptstore restore` a backup, or run `ckptstore recover`; `ckptstore ls --offline` still lists the checkpoints", ErrDamaged)
	case errors.Is(err, jetlog.ErrForeign):
		return fmt.Errorf("%w: %w", ErrForeign, err)
	case err != nil:
		return damage(err)
	}
	if created.Format > Format {
		return fmt.Errorf("%w: its log has format %d, this program knows format %d: upgrade it", ErrNewer, created.Format, Format)
	}
	if want != "" && created.Store != want {
		return fmt.Errorf("%w: store.json has %s, the log has %s: the directory was put together from two stores; restore log/ or store.json from a backup",
			ErrForeign, want, created.Store)
	}
	return nil
}

// NewID returns a new identity for an event, a job or a store: a UUIDv7.
func NewID() string { return uuid.Must(uuid.NewV7()).String() }

// Stamp returns the stamp of a new event, with the machine's clock.
func Stamp(source string) events.Stamp {
	return events.Stamp{ID: NewID(), Source: source, Time: time.Now()}
}

// complaints passes a server's warnings on at debug level: after a kill they are about caches of its
// state, which it rebuilds. Package jetlog's own checks find damage of the log, whatever its cause.
type complaints struct{ slog.Handler }

// Handle implements [slog.Handler].
func (c complaints) Handle(ctx context.Context, r slog.Record) error {
	if r.Level == slog.LevelWarn {
		r.Level = slog.LevelDebug
	}
	if !c.Enabled(ctx, r.Level) {
		return nil
	}
	return c.Handler.Handle(ctx, r)
}

// WithAttrs implements [slog.Handler].
func (c complaints) WithAttrs(a []slog.Attr) slog.Handler { return complaints{c.Handler.WithAttrs(a)} }

// WithGroup implements [slog.Handler].
func (c complaints) WithGroup(name string) slog.Handler { return complaints{c.Handler.WithGroup(name)} }

func serverLogger(to *slog.Logger) *slog.Logger { return slog.New(complaints{to.Handler()}) }

// Dir returns the directory that has the store's files: its location, or that of the data behind a
// URL. It is "" if the log is on a server and the data in a bucket.
func (s *Store) Dir() string { return s.top }

// Formerly returns the identities of the store before it was recovered, the newest first.
func (s *Store) Formerly() []string { return s.formerly }

// Ledger opens the tamper evidence of a store in a directory. It returns [ledger.ErrOff]
// where there is none.
func (s *Store) Ledger() (*ledger.Book, error) {
	if s.owner == nil {
		return nil, fmt.Errorf("%w: it is kept next to the log of a store in a directory", ledger.ErrOff)
	}
	return ledger.OpenBook(s.Location, ledgerLog{s.Log})
}

// Tiles is [Store.Ledger] for a server of the evidence. All callers have the same book, which
// they must not change.
func (s *Store) Tiles() (*ledger.Book, error) {
	if s.owner == nil {
		return s.Ledger()
	}
	return s.tiles.Open(s.Location, ledgerLog{s.Log})
}

// Hashed returns how many events, the first ones of the log, the tamper evidence of this
// owner has hashed, and how many events it had to read from the log itself since this process
// opened the store, also as an earlier owner. Both are 0 if this process does not own the
// store, or the store has no evidence.
func (s *Store) Hashed() (hashed, reread int64) {
	if own := s.owned(); own != nil && own.keeper != nil {
		return own.keeper.Folded(), own.keeper.Reread()
	}
	return 0, 0
}

// Digested returns an error that names the ranks of a checkpoint whose bytes no digest in
// the log covers: their files were adopted and never read.
func (s *Store) Digested(ctx context.Context, c projections.Checkpoint) error {
	ranks, err := s.Data.Unlearned(ctx, RefOf(c))
	if err == nil && len(ranks) > 0 {
		err = problem.Errorf(problem.NotCommitted, "%s@%s: the adopted files of ranks %v have no digests in the log: run `ckptstore verify %s@%s --learn`, which reads and records them", c.Run, c.ID, ranks, c.Run, c.ID)
	}
	return err
}

// InBucket reports whether the checkpoints lie in a bucket, not in a directory.
func (s *Store) InBucket() bool { return s.bucket != nil }
