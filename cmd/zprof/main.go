package main

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"runtime"
	"runtime/pprof"
	"time"

	"github.com/ckptstore/ckptstore/planner/retention"
	"github.com/ckptstore/ckptstore/store"
	"github.com/ckptstore/ckptstore/web"
)

func main() {
	f, _ := os.Create(os.Args[3])
	pprof.StartCPUProfile(f)
	begin := time.Now()
	s, err := store.Open(context.Background(), store.Options{Location: os.Args[1], Logger: slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: slog.LevelDebug}))})
	if err != nil {
		panic(err)
	}
	fmt.Println("open", time.Since(begin))
	if os.Args[2] == "open" {
		pprof.StopCPUProfile()
		var m runtime.MemStats
		runtime.GC()
		runtime.ReadMemStats(&m)
		fmt.Println("heap", m.HeapAlloc>>20, "MB, sys", m.Sys>>20)
		h, _ := os.Create(os.Args[3] + ".heap")
		pprof.WriteHeapProfile(h)
		h.Close()
	}
	begin = time.Now()
	switch os.Args[2] {
	case "gc":
		p, _ := retention.Parse("last=50")
		out, err := s.Collect(context.Background(), store.CollectOptions{Policy: p})
		fmt.Println(len(out.Checkpoints), err, time.Since(begin))
	case "ls":
		rows, err := web.Ask(context.Background(), s.Views(), web.Checkpoints, web.Params{Run: "run-0050"})
		fmt.Println(len(rows), err, time.Since(begin))
	case "verify":
		out, err := s.VerifyLog(context.Background(), nil)
		fmt.Println(out, err, time.Since(begin))
	}
	if os.Args[2] != "open" {
		pprof.StopCPUProfile()
	}
	f.Close()
	begin = time.Now()
	fmt.Println(s.Close(), time.Since(begin))
}
