package jetlog

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/ckptstore/ckptstore/events"
	"github.com/ckptstore/ckptstore/internal/archive"
)

// The old part of a log may be sealed in an archive. The live stream, its tail, then
// has a name of its own, and its metadata states where it begins:
//
//	archive  1 … 65536    stream CKPT_65537  65537 … 70211
//
//	ckptstore-store   identity of the store
//	ckptstore-sealed  65536: the last event in the archive
//	ckptstore-digest  the digest of the archive's last segment, which covers all
//
// Each tail has another name, so that an append for one tail is refused by the next. A
// decision in a lane without messages in the tail expects 0, and any tail would
// otherwise accept it.
const (
	tailPrefix = Stream + "_"

	metaStore  = "ckptstore-store"
	metaSealed = "ckptstore-sealed"
	metaDigest = "ckptstore-digest"
)

// headerFollows is the sequence of a decision's predecessor, if that is in the archive.
// The server's own condition is then 0.
const headerFollows = "ckpt-follows"

// ErrArchive reports that an event is in the archive of the log, and that the archive
// cannot be read from here.
var ErrArchive = errors.New("the archive of the log is out of reach")

// tailName returns the name of the live stream of a log whose archive ends at sealed.
func tailName(sealed uint64) string {
	if sealed == 0 {
		return Stream
	}
	return tailPrefix + strconv.FormatUint(sealed+1, 10)
}

// IsTail reports whether a stream's name is that of a live stream of a log.
func IsTail(name string) bool {
	first, cut := strings.CutPrefix(name, tailPrefix)
	if !cut {
		return name == Stream
	}
	n, err := strconv.ParseUint(first, 10, 64)
	return err == nil && n > 1 && tailName(n-1) == name
}

// tail is the live stream behind a connection.
type tail struct {
	created  time.Time
	sealed   archive.Link
	replicas int
}

// sealedOf returns where the archive before a stream ends, and the store that it
// belongs to.
func sealedOf(c jetstream.StreamConfig) (sealed archive.Link, store string, err error) {
	text := c.Metadata[metaSealed]
	if text == "" && c.Name == Stream {
		return sealed, "", nil
	}
	last, err := strconv.ParseUint(text, 10, 64)
	if err == nil {
		sealed.Last = last
		sealed.Digest, err = archive.ParseDigest(c.Metadata[metaDigest])
	}
	if err == nil && (last == 0 || c.Name != tailName(last)) {
		err = fmt.Errorf("it begins after event %d", last)
	}
	if err != nil {
		return archive.Link{}, "", fmt.Errorf("%w: the beginning of stream %s is unknown: %w; restore its configuration", ErrUnsafe, c.Name, err)
	}
	return sealed, c.Metadata[metaStore], nil
}

// stream returns the name of the live stream, as far as it is known.
func (l *Log) stream() string {
	return tailName(l.sealed().Last)
}

// sealed returns where the archive ends, as far as it is known.
func (l *Log) sealed() archive.Link {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.tail.sealed
}

// Sealed returns where the archive of the log ends; the zero link if the live stream
// has all of the log. It asks the server.
func (l *Log) Sealed(ctx context.Context) (archive.Link, error) {
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	var sealed archive.Link
	err := l.retry(ctx, func(ctx context.Context) error {
		info, err := l.ours(ctx)
		if err == nil {
			sealed, _, err = sealedOf(info.Config)
		}
		return err
	})
	if err != nil {
		return archive.Link{}, fmt.Errorf("state of the log at %s: %w", l.opts.where(), err)
	}
	return sealed, nil
}

// UseArchive sets the directory of the archive, if it was not known at [Connect].
func (l *Log) UseArchive(dir string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.opts.Archive, l.noOld = dir, nil
}

// archived returns the archive before the live stream. It is opened once, outside the
// lock of the log. A hanging file system therefore blocks only callers that need the
// archive, and those until ctx ends.
func (l *Log) archived(ctx context.Context) (*archive.Archive, error) {
	for {
		l.mu.Lock()
		old, failed := l.old, l.noOld
		if time.Since(l.noOldAt) > archiveAgain {
			failed = nil
		}
		var wait chan struct{}
		if old == nil && failed == nil && l.ctx.Err() == nil && l.opts.Archive != "" {
			if l.opening == nil {
				l.opening = make(chan struct{})
				go l.openArchive(l.opening, l.opts.Archive, l.store, l.tail.sealed)
			}
			wait = l.opening
		}
		sealed := l.tail.sealed.Last
		l.mu.Unlock()
		switch {
		case l.ctx.Err() != nil:
			return nil, ErrClosed
		case old != nil:
			return old, nil
		case failed != nil:
			return nil, failed
		case wait == nil:
			return nil, fmt.Errorf("%w: events 1 to %d are sealed in files next to the log: open the store by its directory, or mount that here under the same path", ErrArchive, sealed)
		}
		select {
		case <-wait:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// archiveAgain is the delay before the archive is opened again after a failure: a
// network directory may show a new file late.
const archiveAgain = time.Second

// openArchive opens the archive that ends at sealed, and closes done.
func (l *Log) openArchive(done chan struct{}, dir, store string, sealed archive.Link) {
	a, err := archive.Open(dir, store, sealed)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.opening = nil
	close(done)
	switch {
	case l.ctx.Err() != nil || l.tail.sealed != sealed:
		if a != nil {
			_ = a.Close() // another has taken its place
		}
	case err != nil:
		l.noOld, l.noOldAt = damagedArchive(err), time.Now()
	default:
		l.old = a
	}
}

// damagedArchive converts an archive's error to an error of the log.
func damagedArchive(err error) error {
	if errors.Is(err, archive.ErrDamaged) || errors.Is(err, archive.ErrForeign) {
		return fmt.Errorf("%w: %w; %s", ErrGap, err, restore)
	}
	if errors.Is(err, os.ErrClosed) { // a longer one has taken its place
		return fmt.Errorf("%w: %w", errAgain, err)
	}
	return err
}

// adopt declares the stream to be the log of store from now on.
func (l *Log) adopt(info *jetstream.StreamInfo, store string) error {
	sealed, of, err := sealedOf(info.Config)
	if err != nil {
		return err
	}
	if sealed.Last > 0 && of != store {
		return fmt.Errorf("%w: stream %s continues the log of store %s, not of %s", ErrForeign, info.Config.Name, of, store)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.old != nil && l.old.End() != sealed {
		l.dropArchive() // a reader inside it continues in the next one
	}
	l.noOld = nil
	l.store, l.tail, l.checked = store, tail{created: info.Created, sealed: sealed, replicas: info.Config.Replicas}, l.epoch
	return nil
}

// dropArchive closes the archive in another goroutine, because the caller holds the
// lock: a reader in a hanging file system holds the archive's own lock.
func (l *Log) dropArchive() {
	old := l.old
	l.old = nil
	go func() { _ = old.Close() }() // nothing was written
}

// continues reports whether a different stream than the opened one, as the caller knew
// it, continues where that one was sealed.
func (l *Log) continues(info *jetstream.StreamInfo) bool {
	sealed, store, err := sealedOf(info.Config)
	l.mu.Lock()
	defer l.mu.Unlock()
	return err == nil && store == l.store && (sealed.Last > l.tail.sealed.Last || info.Created.Equal(l.tail.created))
}

// CreateTail creates the live stream of store's log after the sealed part, on a server
// that has no stream of events. like is the configuration of its predecessor, as
// [Log.TailConfig] returned it. The stream is durable on return, and [Log.Open] opens
// it.
func (l *Log) CreateTail(ctx context.Context, store string, sealed archive.Link, like TailConfig) error {
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	c := like.config
	c.Name, c.FirstSeq, c.Compression = tailName(sealed.Last), sealed.Last+1, jetstream.NoCompression
	c.Metadata = map[string]string{
		metaStore: store, metaSealed: strconv.FormatUint(sealed.Last, 10), metaDigest: sealed.Digest.String(),
	}
	err := l.retry(ctx, func(ctx context.Context) error {
		_, err := l.js.CreateStream(ctx, c)
		return err
	})
	if err != nil {
		return fmt.Errorf("make stream %s at %s: %w", c.Name, l.opts.where(), err)
	}
	return nil
}

// TailConfig is the configuration of the live stream. An operator may have changed safe
// settings, and the next stream keeps them.
type TailConfig struct{ config jetstream.StreamConfig }

// TailConfig asks for the configuration of the live stream.
func (l *Log) TailConfig(ctx context.Context) (TailConfig, error) {
	ctx, cancel := deadline(ctx, DefaultAppend)
	defer cancel()
	var c TailConfig
	err := l.retry(ctx, func(ctx context.Context) error {
		info, err := l.ours(ctx)
		if err == nil {
			c.config = info.Config
		}
		return err
	})
	if err != nil {
		return c, fmt.Errorf("configuration of the log at %s: %w", l.opts.where(), err)
	}
	return c, nil
}

// tailInfo asks once for the live stream under its current name.
func (l *Log) tailInfo(ctx context.Context) (*jetstream.StreamInfo, error) {
	name := l.stream()
	s, err := l.js.Stream(ctx, name)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		s, err = l.successor(ctx, name, err)
	}
	if err != nil {
		return nil, err
	}
	return s.CachedInfo(), nil
}

// successor returns the stream that continues a missing one, which was sealed. Its
// error is [jetstream.ErrStreamNotFound] only if there is none.
func (l *Log) successor(ctx context.Context, name string, missing error) (jetstream.Stream, error) {
	switch l.nc.ConnectedServerName() {
	case embeddedName:
	case "": // the server that answered is gone: its owner may be cutting again
		return nil, fmt.Errorf("stream %s is looked for again: %w", name, errAgain)
	default: // a standalone server never cuts, and this client may not be allowed to ask
		return nil, missing
	}
	found, err := l.js.StreamNameBySubject(ctx, events.Filter)
	switch {
	case errors.Is(err, jetstream.ErrStreamNotFound), err == nil && !IsTail(found):
		return nil, missing
	case err != nil:
		return nil, err // the connection broke: the owner is cutting again, or gone
	case found == name:
		return nil, fmt.Errorf("stream %s is looked for again: %w", name, errAgain)
	}
	s, err := l.js.Stream(ctx, found)
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		return nil, fmt.Errorf("stream %s was cut: %w", found, errAgain)
	}
	return s, err
}

// readAhead is the number of events that a reader lets the server send ahead.
const readAhead = 4096

// deliver creates a consumer of a stream's events from a sequence on, with a filter
// only of those under it. The consumer does not outlive its server's process. once
// bounds its creation; end removes it.
func (l *Log) deliver(ctx, once context.Context, stream, filter string, from uint64) (_ jetstream.MessagesContext, end func(), err error) {
	name := rand.Text()
	consumer, err := l.js.CreateConsumer(once, stream, jetstream.ConsumerConfig{
		Name:              name,
		FilterSubject:     filter,
		DeliverPolicy:     jetstream.DeliverByStartSequencePolicy,
		OptStartSeq:       from,
		AckPolicy:         jetstream.AckNonePolicy,
		ReplayPolicy:      jetstream.ReplayInstantPolicy,
		InactiveThreshold: time.Minute,
		MemoryStorage:     true,
		Replicas:          1,
	})
	if errors.Is(err, jetstream.ErrStreamNotFound) {
		err = l.suspect(err)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("consumer: %w", err)
	}
	remove := func() {
		// The server drops an unused consumer by itself; this is only sooner.
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		if l.nc.IsConnected() {
			_ = l.js.DeleteConsumer(ctx, stream, name)
		}
	}
	messages, err := consumer.Messages(
		jetstream.PullMaxMessages(readAhead), jetstream.PullThresholdMessages(readAhead/2),
		jetstream.PullExpiry(30*time.Second), jetstream.PullHeartbeat(2*time.Second),
		jetstream.WithMessagesErrOnMissingHeartbeat(true))
	if err != nil {
		remove()
		return nil, nil, fmt.Errorf("consumer: %w", err)
	}
	return messages, func() { messages.Stop(); remove() }, nil
}
