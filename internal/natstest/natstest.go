// Package natstest provides a NATS server that is not part of a store, and a client
// that follows no rules, for tests.
package natstest

import (
	"errors"
	"fmt"
	"time"

	"github.com/nats-io/nats-server/v2/server"
)

// Open lets any client do anything in the account that stores are kept in.
const Open = `accounts { ckpt { jetstream: enabled, users: [ { user: any, password: any } ] } }
no_auth_user: any`

// startTime bounds a start.
const startTime = 30 * time.Second

// Start starts a server on loopback over the streams in dir, with a configuration such
// as [Open]. stop returns when it has ended.
func Start(dir, config string) (url string, stop func(), err error) {
	o := &server.Options{}
	if err := o.ProcessConfigString(config); err != nil {
		return "", nil, fmt.Errorf("start a NATS server: %w", err)
	}
	o.Host, o.Port, o.NoSigs, o.NoLog, o.JetStream, o.SyncAlways, o.StoreDir = "127.0.0.1", server.RANDOM_PORT, true, true, true, true, dir
	s, err := server.NewServer(o)
	if err != nil {
		return "", nil, fmt.Errorf("start a NATS server: %w", err)
	}
	s.Start()
	stop = func() {
		s.Shutdown()
		s.WaitForShutdown()
	}
	if !s.ReadyForConnections(startTime) {
		stop()
		return "", nil, errors.New("start a NATS server: it was not ready in time")
	}
	return s.ClientURL(), stop, nil
}
