package trainer

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/ckptstore/ckptstore/internal/launch"
	"github.com/ckptstore/ckptstore/internal/launch/process"
	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/problem"
	"github.com/ckptstore/ckptstore/internal/problem/system"
	"github.com/ckptstore/ckptstore/internal/services"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/store"
)

// follow runs this node's part of a job that another trainer coordinates. A node that was
// taken for lost joins again, and so does one whose coordinating trainer was started again.
func (o runOptions) follow(ctx context.Context, cfg launch.Config, n placement, at string) error {
	me := o.self(n, cfg)
	heir := &heir{}
	member := false // this node has joined before
	for {
		job, err := o.followOnce(ctx, cfg, n, &me, at, heir)
		if ctx.Err() != nil || ends(err) {
			if coordinated, last := heir.wait(); coordinated {
				return last // of the job
			}
		}
		o.beside = heir.beside
		if member && job == "" && me.Index >= 0 && slices.Contains(system.Kinds(err), problem.Conflict) {
			cfg.Logger.Warn("joining with another index", "because", err)
			me.Index = -1 // another node was faster to take the index that this one had
			if n.ranked {
				me.Key = "" // it is that of the index
			}
			continue
		}
		member = member || job != ""
		if ctx.Err() == nil && errors.Is(err, errSucceed) {
			err = o.succeed(ctx, cfg, n, job, at)
			if !errors.Is(err, errTaken) && !errors.As(err, new(*store.RunningError)) {
				return err
			}
			cfg.Logger.Warn("not taking over", "because", err)
			at = o.elsewhere(ctx, at)
			continue
		}
		if ctx.Err() == nil && (errors.Is(err, nodes.ErrExpelled) || errors.Is(err, nodes.ErrRestarted)) {
			cfg.Logger.Warn("joining again", "because", err)
			at = o.elsewhere(ctx, at)
			continue
		}
		if ended := (*nodes.EndedError)(nil); errors.As(err, &ended) && ended.Code == 0 {
			cfg.Logger.Info("job has ended", "node", me.Index)
			return nil
		}
		return err
	}
}

// ends reports whether a node follows no more after an error.
func ends(err error) bool {
	return !errors.Is(err, errSucceed) && !errors.Is(err, nodes.ErrExpelled) && !errors.Is(err, nodes.ErrRestarted)
}

// followOnce follows one job, as the node me, and returns its ID, if it joined one.
func (o runOptions) followOnce(ctx context.Context, cfg launch.Config, n placement, me *nodes.Node, at string, heir *heir) (id string, err error) {
	port, err := launch.HoldPort()
	if err != nil {
		return "", err
	}
	me.Port = port.Port()
	contact := &process.Contact{}
	join := nodes.JoinConfig{Address: at, Token: o.token, Self: *me, Logger: cfg.Logger, Wait: o.endpointWait, Answered: contact.Answered}
	url := strings.Contains(o.store, "://")
	if !url {
		dir, err := filepath.Abs(o.store)
		if err != nil {
			return "", fmt.Errorf("--store: %w", err)
		}
		join.Dir, join.Token = joinDir(dir), ""
	}
	joining, joined := o.unlessMoved(ctx, at)
	defer joined()
	link, err := nodes.Join(joining, join)
	joined()
	if errors.Is(err, errHere) {
		return "", errHere
	}
	if errors.Is(err, errMoved) {
		return "", fmt.Errorf("%w: %w", nodes.ErrRestarted, err)
	}
	if err != nil {
		return "", err
	}
	defer func() {
		if err != nil && !link.Ending() {
			leave(ctx, link, err, cfg.Logger)
		}
		link.Close()
	}()
	*me = link.Self() // keeps its key, and its index under another coordinating trainer
	me.Index = link.Index()
	var job welcome
	if err := json.Unmarshal(link.Welcome(), &job); err != nil {
		return "", fmt.Errorf("join the job at %s: %w", at, err)
	}
	if err := o.expects(job, at); err != nil {
		return "", err
	}
	cfg.Run, cfg.Job, cfg.TrialConfig, cfg.StrictReplicas = job.Run, job.Job, job.Config, job.Strict
	cfg.SaveTimeout, cfg.DrainTimeout, cfg.Grace, cfg.Collective = job.SaveTimeout, job.Drain, job.Grace, job.Collective
	cfg.Logger.Info("joined", "endpoint", at, "run", job.Run, "job", job.Job, "node", link.Index())
	if o.logReplicas != 1 {
		watching, stop := context.WithCancel(ctx)
		defer stop()
		s := successor{store: o.store, me: o.copyIndex(n), log: cfg.Logger}
		if heir.beside = job.Standby; heir.beside {
			cfg.Carrier = &launch.Carrier{}
			s.carrier, s.heir = cfg.Carrier, heir
			of := cfg
			next := o
			next.beside = true
			heir.by(func(at string) (bool, error) { return next.inherit(ctx, of, n, at) })
		}
		go s.watch(watching, link, job.Job)
	}
	open := store.Options{Location: o.store, Patience: o.wait, Logger: slog.New(quietAfter{cfg.Logger.Handler(), link})}
	if !url {
		if err := link.ProveShared(ctx, join.Dir); err != nil {
			return job.Job, fmt.Errorf("join the job at %s: %w", at, err)
		}
		if err := o.unreplicated(n); err != nil {
			return job.Job, err
		}
		open.Patience = o.endpointWait // the link ends before, if the coordinating trainer does
	}
	if !url && o.logReplicas == 1 {
		open.Owner = func(ctx context.Context, door store.Door) (net.Conn, error) {
			return link.Dial(ctx, "/v1/store/"+string(door))
		}
	}
	life, end := context.WithCancel(ctx)
	defer end()
	go func() {
		select {
		case <-link.Done():
			end()
		case <-life.Done():
		}
	}()
	followed := false
	err = o.opened(life, cfg, open, func(_ context.Context, st *store.Store, cfg launch.Config) (err error) {
		followed = true
		about := services.Following(st, cfg.Logger, nil)
		defer func() { err = errors.Join(err, about.Close()) }()
		cfg.Services, cfg.Contact, cfg.Port = about, contact, port
		if cfg.Carrier != nil {
			cfg.Survival = st.Living(cfg.Run)
		}
		return launch.Follow(ctx, cfg, sessionStore(st, cfg, o.parts.Storage), link)
	})
	if ended := link.Err(); !followed && ended != nil { // while the store was being opened
		return job.Job, ended
	}
	return job.Job, err
}

// quietAfter drops what is not a warning once the job has ended: the connections to its log
// end with it.
type quietAfter struct {
	slog.Handler
	link *nodes.Link
}

// Enabled implements [slog.Handler].
func (h quietAfter) Enabled(ctx context.Context, level slog.Level) bool {
	return h.Handler.Enabled(ctx, level) && (level >= slog.LevelWarn || !h.link.Ending())
}

// WithAttrs implements [slog.Handler].
func (h quietAfter) WithAttrs(of []slog.Attr) slog.Handler {
	return quietAfter{h.Handler.WithAttrs(of), h.link}
}

// WithGroup implements [slog.Handler].
func (h quietAfter) WithGroup(name string) slog.Handler {
	return quietAfter{h.Handler.WithGroup(name), h.link}
}

// leave tells the coordinating trainer that this node ends because of why.
func leave(ctx context.Context, link *nodes.Link, why error, log *slog.Logger) {
	words, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	if err := link.Leave(words, session.Beginning(why.Error(), session.MaxMessage)); err != nil {
		log.Warn("end of this node not sent to the coordinating trainer", "error", err)
	}
}

// leaveTimeout bounds the last words of a node that fails.
const leaveTimeout = 5 * time.Second
