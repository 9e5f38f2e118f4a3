package jetlog

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/nats-io/nats.go"
)

// servedSubject is where the owner of a served store answers. It is no subject
// of the log.
const servedSubject = "ckptstore.served"

// Served is what the owner of a directory says to clients that cannot look
// into owner.json.
type Served struct {
	Store     string `json:"store"`     // identity
	Directory string `json:"directory"` // absolute, on Host
	Host      string `json:"host"`
}

// Announce answers [Log.Served] until the log is closed.
func (l *Log) Announce(s Served) error {
	text, err := json.Marshal(s)
	if err != nil {
		return fmt.Errorf("announce the store: %w", err)
	}
	_, err = l.nc.Subscribe(servedSubject, func(m *nats.Msg) {
		// A client that hears nothing asks again.
		_ = m.Respond(text)
	})
	if err == nil {
		err = l.nc.FlushTimeout(l.opts.Timeout)
	}
	if err != nil {
		return fmt.Errorf("announce the store: %w", err)
	}
	return nil
}

// Served asks the owner of the store for its directory. Nobody answers when
// the log is on a server of its own.
func (l *Log) Served(ctx context.Context) (Served, error) {
	ctx, cancel := deadline(ctx, 10*time.Second)
	defer cancel()
	var s Served
	err := l.retry(ctx, func(ctx context.Context) error {
		m, err := l.nc.RequestWithContext(ctx, servedSubject, nil)
		if err != nil {
			return err
		}
		return json.Unmarshal(m.Data, &s)
	})
	if err != nil {
		return Served{}, fmt.Errorf("ask the owner at %s for the store's directory: %w", l.opts.where(), err)
	}
	return s, nil
}
