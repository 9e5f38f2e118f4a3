package store

import (
	"context"
	"errors"

	"github.com/ckptstore/ckptstore/events/jetlog"
)

// relay lets clients in to the log of a server's store.
type relay struct {
	*jetlog.Relay
	token *localToken // that clients show; nil if it was not made here
}

// startRelay listens where the options say.
func (s *Store) startRelay(ctx context.Context) (*relay, error) {
	r, addr, err := s.Log.Relay(ctx, jetlog.RelayOptions{Listen: *s.opts.Listen})
	if err != nil {
		return nil, err
	}
	own := &relay{Relay: r}
	if s.opts.sharing {
		if own.token, err = shareToken(addr.String(), s.opts.Listen.Token); err != nil {
			return nil, errors.Join(err, own.close())
		}
	}
	if s.opts.Bound != nil {
		s.opts.Bound(addr)
	}
	return own, nil
}

// close ends the connections of all clients.
func (r *relay) close() error {
	r.Close()
	if r.token != nil {
		return r.token.withdraw()
	}
	return nil
}
