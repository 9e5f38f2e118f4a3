package launch

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"

	"github.com/ckptstore/ckptstore/internal/nodes"
	"github.com/ckptstore/ckptstore/internal/preflight"
	"github.com/ckptstore/ckptstore/internal/session"
	"github.com/ckptstore/ckptstore/internal/session/broadcast"
	"github.com/ckptstore/ckptstore/internal/session/heirs"
	"github.com/ckptstore/ckptstore/internal/session/replica"
	"github.com/ckptstore/ckptstore/internal/session/restore"
)

// servePeers serves the requests of other nodes: their measurements, and their replicas if the
// job has any.
func (j *job) servePeers() {
	h := http.NewServeMux()
	h.Handle(preflight.Path, preflight.Handler())
	h.Handle(broadcast.Path, j.Shares())
	if keeper := j.Keeper(); keeper != nil {
		h.Handle("/", keeper)
	}
	switch {
	case j.cfg.Peers == nil:
	case j.link != nil:
		j.link.ServePeers(j.cfg.Peers, h)
	case j.cfg.Endpoint != nil:
		j.cfg.Endpoint.ServePeers(j.cfg.Peers, h)
	}
}

// partners returns the places that keep the slots of each place of the group; nil if the job has no
// replicas. Nodes with too few partners are named in the log.
func (f *fleet) partners() [][]int {
	if f.cfg.Replicas < 1 || f.job.members != nil {
		if slices.ContainsFunc(f.members, func(m nodes.Member) bool { return m.Keeps }) {
			f.log.Warn("slots of nodes have no replica; start the coordinating trainer with --replicas too")
		}
		return nil
	}
	var domains []string
	var takes []bool
	var alone, few []int
	for _, m := range f.members {
		domains, takes = append(domains, m.Domain), append(takes, m.PeerURL() != "" && m.Keeps)
	}
	at := replica.Partners(domains, takes, f.cfg.Replicas)
	same := 0
	for place, partners := range at {
		switch apart := func(partner int) bool { return domains[place] == "" || domains[place] != domains[partner] }; {
		case len(partners) == 0:
			alone = append(alone, f.members[place].Index)
		case !slices.ContainsFunc(partners, apart):
			same++
		}
		if n := len(partners); n > 0 && n < f.cfg.Replicas {
			few = append(few, f.members[place].Index)
		}
	}
	if len(alone) > 0 {
		f.log.Warn("slots of nodes have no replica; start their trainers with --replicas too", "nodes", alone)
	}
	if len(few) > 0 {
		f.log.Warn("slots of nodes have fewer replicas than --replicas: the group has too few nodes", "nodes", few, "replicas", len(at[slices.IndexFunc(at, func(of []int) bool { return len(of) > 0 })]))
	}
	if same > 0 {
		f.log.Warn("replicas are in the same failure domain as their nodes; give nodes of other domains", "nodes", same)
	}
	return at
}

// replicaOrder returns a node's part in the replication, by its place; nil: none.
func (o *others) replicaOrder(place int) *replicaOrder {
	if o.partners == nil {
		return nil
	}
	order := &replicaOrder{From: []int{}, Ahead: o.ahead}
	for _, to := range o.partners[place] {
		m := o.members[to]
		order.To = append(order.To, replicaAt{m.Index, m.PeerURL(), m.PeerPin})
	}
	for from, partners := range o.partners {
		if slices.Contains(partners, place) {
			order.From = append(order.From, o.order.Nodes[from]...)
		}
	}
	return order
}

// ownParts reports whether each rank of the group will need what the rank of its number has saved of the
// checkpoint to resume from, as far as the size of the group tells: then a node that lacks these slots may
// fetch them before its ranks ask.
func (j *job) ownParts(ctx context.Context, resume string) bool {
	if resume == "" || restore.IsPath(resume) || strings.Contains(resume, "@") {
		return false // of another trial
	}
	c, err := j.store.Views.Resolve(ctx, restore.Qualify(j.cfg.Run, j.cfg.Trial, resume))
	return err == nil && c.ID == resume && c.WorldSize == j.cfg.World() && len(c.Participants) == 0
}

// peerClient returns how this node makes clients for requests to other nodes; nil: it serves none
// of theirs, and so makes none.
func (j *job) peerClient() func(pin string) *http.Client {
	switch {
	case j.cfg.Peers == nil:
		return nil
	case j.link != nil:
		return j.link.PeerClient
	case j.cfg.Endpoint != nil:
		return j.cfg.Endpoint.PeerClient
	}
	return nil
}

// broadcasts returns how this node makes clients to take what others have read; nil: it reads
// alone.
func (j *job) broadcasts() func(pin string) *http.Client {
	if !j.cfg.Broadcast {
		return nil
	}
	return j.peerClient()
}

// peerAt returns where the node at a place serves the requests of others.
func (o *others) peerAt(place int) restore.Peer {
	m := o.members[place]
	return restore.Peer{URL: m.PeerURL(), Pin: m.PeerPin}
}

// replication returns a node's part in the replication as its session has it.
func (j *job) replication(order *replicaOrder) *session.Replicas {
	if order == nil {
		return nil
	}
	r := &session.Replicas{From: order.From, Ahead: order.Ahead}
	for _, to := range order.To {
		r.To = append(r.To, replica.Partner{Node: fmt.Sprint("node ", to.Node), Index: to.Node, URL: to.URL, Client: j.peerClient()(to.Pin)})
	}
	return r
}

// replicas returns this node's part in the replication of an attempt, with the orders that the
// coordinating process may give.
func (o *others) replicas() *session.Replicas {
	if o == nil || o.partners == nil {
		return nil
	}
	r := &session.Replicas{} // this node has no slots
	if place := o.job.cfg.Node; place >= 0 {
		r = o.replication(o.replicaOrder(place))
	}
	r.At, r.Order = o.partners, func(place int, order heirs.Order) {
		o.must(o.members[place].Index, cmdAdopt, adoptOrder{o.order.Attempt, order})
	}
	return r
}
