package store

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/ckptstore/ckptstore/events/jetlog"
)

// dialURL connects to the server of a URL. Without a token it shows the one that
// an owner on this machine has made for its user.
func dialURL(ctx context.Context, url string, a *Access, o jetlog.Options) (*jetlog.Log, error) {
	if a == nil {
		env := AccessFromEnv()
		a = &env
	}
	if err := a.client(&o); err != nil {
		return nil, err
	}
	o.URL = url
	hint := ""
	if o.Token == "" {
		search := searchToken(url)
		if err := search.apply(&o); o.FindToken == nil {
			hint = search.hint(err)
		}
	}
	log, err := jetlog.Connect(ctx, o)
	if errors.Is(err, jetlog.ErrNotAllowed) {
		return nil, fmt.Errorf("%w; $%s or $%s is the token, $%s the CA that the server is checked by, $%s and $%s this client's certificate%s",
			err, EnvToken, EnvTokenFile, EnvTLSCA, EnvTLSCert, EnvTLSKey, hint)
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrNoStore, err)
	}
	return log, nil
}

// findArchive says to a log that was sealed where its archive is: below the
// directory that its owner serves, which is here under the same path.
func findArchive(ctx context.Context, log *jetlog.Log) error {
	sealed, err := log.Sealed(ctx)
	if errors.Is(err, jetlog.ErrNoLog) || err == nil && sealed.Last == 0 {
		return nil
	}
	if err != nil {
		return err
	}
	served, err := log.Served(ctx)
	if err != nil {
		return err
	}
	log.UseArchive(archiveDir(served.Directory))
	return nil
}

// openURL connects to a NATS server, or to the owner of a directory that
// listens. The views are folded in memory.
func openURL(ctx context.Context, o Options) (_ *Store, err error) {
	how := jetlog.Options{Logger: o.Logger}
	if o.Reader {
		how.ReadOnly = errReading
	}
	log, err := dialURL(ctx, o.Location, o.Access, how)
	if err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	defer func() {
		if err != nil {
			err = damage(err)
			log.Close()
		}
	}()
	if err := findArchive(ctx, log); err != nil {
		return nil, fmt.Errorf("open store: %w", err)
	}
	created, _, err := log.Open(ctx)
	if errors.Is(err, jetlog.ErrNoLog) {
		return nil, fmt.Errorf("%w at %s: %w; start the server as it was, or, if there never was a store, make one with `ckptstore init --store URL --data DIR`",
			ErrNoStore, jetlog.Redacted(o.Location), err)
	}
	if err != nil {
		return nil, err
	}
	if err := checkLog(ctx, log, created.Store); err != nil {
		return nil, err
	}
	s := &Store{ID: created.Store, Location: jetlog.Redacted(o.Location), Log: log, opts: o, formerly: created.Formerly}
	if s.runtime, err = holdRuntime(created.Store); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.runtime.release())
		}
	}()
	s.Runtime = s.runtime.dir
	if !o.Reader {
		if err := sweepJobs(s.Runtime); err != nil {
			return nil, fmt.Errorf("open store: %w", err)
		}
		sweepRuntimes(s.Runtime, o.Logger)
	}
	at, err := locate(ctx, log, created)
	if err != nil {
		return nil, err
	}
	id, err := at.probe(o.Reader)
	if err != nil {
		return nil, err
	}
	s.Copy = id.Copy
	if at.owned {
		log.UseArchive(archiveDir(at.dir)) // the owner may yet cut the log
	}
	if err := s.openData(filepath.Join(at.dir, "data"), filepath.Join(at.dir, "blobs")); err != nil {
		return nil, err
	}
	if _, err := recorded(ctx, s, log); err != nil {
		return nil, err
	}
	if s.local, err = follow(ctx, "", log, s); err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			s.end()
			s.leasing.Wait()
			err = errors.Join(err, s.local.close())
		}
	}()
	if at.owned && o.Listen != nil {
		return nil, fmt.Errorf("%w: %s is served by the owner of %s already: clients connect to it", ErrLocation, jetlog.Redacted(o.Location), at.dir)
	}
	if at.owned || o.Reader {
		return s, nil
	}
	// No process owns a server's store: each that opens it does an owner's work.
	if err := repairAll(ctx, s, log, s.local.db.View, 0, unpaced); err != nil {
		return nil, err
	}
	if !o.LeaveVoids {
		q := &quarantine{log: log, view: s.local.db.View, logger: o.Logger}
		s.leasing.Go(func() { q.keep(s.life) })
	}
	if o.Listen != nil {
		if s.relay, err = s.startRelay(ctx); err != nil {
			return nil, err
		}
	}
	return s, nil
}
