package main

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"syscall"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ckptstore/ckptstore/internal/answer"
	"github.com/ckptstore/ckptstore/internal/api"
	"github.com/ckptstore/ckptstore/internal/console"
	"github.com/ckptstore/ckptstore/internal/observe"
	"github.com/ckptstore/ckptstore/internal/otlp"
	"github.com/ckptstore/ckptstore/internal/page"
	"github.com/ckptstore/ckptstore/internal/query"
	"github.com/ckptstore/ckptstore/internal/store"
	"github.com/ckptstore/ckptstore/projections"
)

// opened is the output of `ui --json`.
type opened struct {
	URL     string `json:"url"`
	Link    string `json:"link"`    // with the token
	Tunnel  string `json:"tunnel"`  // the command for another machine
	Running bool   `json:"running"` // by another process
}

func (a *app) uiCommand() *cobra.Command {
	var web api.Listen
	c := &cobra.Command{
		Use: "ui [REF]", Short: "Print the link to the page of the store, and serve it if no process does", Args: console.Args(cobra.MaximumNArgs(1)),
		Long: `Print the link to the page of the store or, with REF, of a run or a checkpoint. If a process
of this user on this machine serves the store over HTTP, as serve --http and trainer run
--http do, the link leads there. Otherwise ui serves the store until SIGINT or SIGTERM.

The link has a token in its fragment, which browsers do not send to servers. Every process that
has the token can do what this user can: keep the link secret. For a browser on another
machine, ui prints the ssh command that makes the server reachable there.

A store that this user cannot write is served by its receipts, as with ls --offline: without
events, metrics and decisions.`,
		Example: "  ckptstore ui\n  ckptstore ui bert@latest\n  curl -H \"Authorization: Bearer $TOKEN\" http://127.0.0.1:7700/api/v1/runs",
		RunE: func(c *cobra.Command, refs []string) error {
			if err := web.Validate(); err != nil {
				return err
			}
			ref := ""
			if len(refs) == 1 {
				ref = refs[0]
			}
			do := func(s *store.Store) error {
				return a.ui(c.Context(), s, web, ref, c.Flags().Changed("http"))
			}
			if !a.byReceipts() {
				return a.with(c.Context(), do)
			}
			s, err := store.OpenByReceipts(c.Context(), a.options())
			if err != nil {
				return err
			}
			return errors.Join(do(s), s.Close())
		},
	}
	web.Flags(c.Flags(), "127.0.0.1:7700")
	return c
}

func (a *app) ui(ctx context.Context, s *store.Store, web api.Listen, ref string, chosen bool) error {
	place, err := placeOf(ctx, s, ref)
	if err != nil {
		return err
	}
	r, token, found, err := api.Find(ctx, s)
	if err != nil {
		return err
	}
	if found {
		return a.printOpened(opened{r.URL, r.Link(token, place), r.Tunnel(), true})
	}
	server, err := a.serveHTTP(ctx, s, web, nil)
	if errors.Is(err, syscall.EADDRINUSE) && !chosen {
		web.Address = "127.0.0.1:0"
		server, err = a.serveHTTP(ctx, s, web, nil)
	}
	if err != nil {
		return err
	}
	if err := a.printOpened(opened{server.URL, server.Link(place), server.Tunnel(), false}); err != nil {
		return errors.Join(err, server.Close())
	}
	if !a.Quiet {
		fmt.Fprintf(a.Err, "serving store %s in %s; stop with Ctrl-C\n", s.ID, s.Location)
	}
	<-ctx.Done()
	return server.Close()
}

// serveHTTP serves the HTTP API of a store. tracer is nil if this process sends no traces.
func (a *app) serveHTTP(ctx context.Context, s *store.Store, web api.Listen, tracer *otlp.Tracer) (*api.Server, error) {
	web.Logger, web.Version, web.Page = a.logger(), version(), page.Handler()
	web.Observe = observe.Handler(s, observe.Options{Version: web.Version, Logger: web.Logger, Traces: tracer})
	return api.Serve(ctx, s, web)
}

// placeOf returns the place of the page for a run or a checkpoint; that of the store for "".
func placeOf(ctx context.Context, s *store.Store, ref string) (string, error) {
	if ref == "" {
		return "/", nil
	}
	err := answer.KnownRun(ctx, s.Views(), ref)
	if err == nil {
		return "/runs/" + url.PathEscape(ref), nil
	}
	if !errors.Is(err, projections.ErrNotFound) {
		return "", err
	}
	c, err := query.Ask(ctx, s.Views(), query.Resolve, query.Params{Ref: ref})
	return "/runs/" + url.PathEscape(c.Run) + "/c/" + url.PathEscape(c.ID), err
}

func (a *app) printOpened(out opened) error {
	return console.Emit(a.Console, out, []opened{out}, func(w *tabwriter.Writer, _ bool) {
		console.Row(w, "open", out.Link)
		console.Row(w, "elsewhere", out.Tunnel)
	})
}
