// A program in Go by the client library of XenAPI: client URL USER; the password is in TAPIO_PASSWORD.
//
// It logs in, lists, makes a VDI, imports its contents, keeps them in a snapshot that it sees by events, exports that and
// compares each byte. The library has no transfers and reads no answer of event.from, so these are calls of net/http and
// of the library's APICall, as programs that use it do.
package main

import (
	"bytes"
	"crypto/rand"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"

	xmlrpc "github.com/amfranz/go-xmlrpc-client"
	xenapi "github.com/terra-farm/go-xen-api-client"
)

const mib = 1 << 20

func check(err error, what string) {
	if err != nil {
		fmt.Fprintf(os.Stderr, "%s: %v\n", what, err)
		os.Exit(1)
	}
}

func must(holds bool, what string) {
	if !holds {
		check(fmt.Errorf("it does not hold"), what)
	}
}

// transfer sends or fetches the contents of a VDI.
func transfer(client *http.Client, method, address string, session xenapi.SessionRef, vdi xenapi.VDIRef, body []byte) []byte {
	name := map[string]string{"GET": "export_raw_vdi", "PUT": "import_raw_vdi"}[method]
	query := url.Values{"session_id": {string(session)}, "vdi": {string(vdi)}, "format": {"raw"}}
	request, err := http.NewRequest(method, address+"/"+name+"?"+query.Encode(), bytes.NewReader(body))
	check(err, name)
	reply, err := client.Do(request)
	check(err, name)
	defer reply.Body.Close()
	said, err := io.ReadAll(reply.Body)
	check(err, name)
	must(reply.StatusCode == http.StatusOK, fmt.Sprintf("%s: %s %.200s", name, reply.Status, said))
	return said
}

// seen asks for the events since a token, and whether one of them is the making of an object.
func seen(client *xenapi.Client, session xenapi.SessionRef, token, ref string) (string, bool) {
	result, err := client.APICall("event.from", string(session), []interface{}{"vdi"}, token, 30.0)
	check(err, "event.from")
	batch := result.Value.(xmlrpc.Struct)
	isSeen := false
	for _, event := range batch["events"].([]interface{}) {
		event := event.(xmlrpc.Struct)
		isSeen = isSeen || (event["ref"] == ref && event["operation"] == "add")
	}
	return batch["token"].(string), isSeen
}

func main() {
	address, user, password := os.Args[1], os.Args[2], os.Getenv("TAPIO_PASSWORD")
	transport := &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	client, err := xenapi.NewClient(address, transport)
	check(err, "connect")
	_, err = client.Session.LoginWithPassword(user, "wrong", "1.0", "go")
	must(err != nil, "a wrong password is refused")
	session, err := client.Session.LoginWithPassword(user, password, "1.0", "go")
	check(err, "login")

	hosts, err := client.Host.GetAll(session)
	check(err, "host.get_all")
	must(len(hosts) == 1, "one host")
	pools, err := client.Pool.GetAll(session)
	check(err, "pool.get_all")
	sr, err := client.Pool.GetDefaultSR(session, pools[0])
	check(err, "pool.get_default_SR")
	vms, err := client.VM.GetAllRecords(session)
	check(err, "VM.get_all_records")
	must(len(vms) > 0, "VMs are listed")

	token, _ := seen(client, session, "", "")
	vdi, err := client.VDI.Create(session, xenapi.VDIRecord{
		NameLabel: "of Go", SR: sr, VirtualSize: 8 * mib, Type: xenapi.VdiTypeUser,
		OtherConfig: map[string]string{}, XenstoreData: map[string]string{}, SmConfig: map[string]string{},
		Tags: []string{"go"}, OnBoot: xenapi.OnBootPersist,
	})
	check(err, "VDI.create")
	record, err := client.VDI.GetRecord(session, vdi)
	check(err, "VDI.get_record")
	must(record.NameLabel == "of Go" && record.VirtualSize == 8*mib && record.Tags[0] == "go", "the record")

	web := &http.Client{Transport: transport}
	contents := make([]byte, 8*mib)
	_, err = rand.Read(contents[:5*mib])
	check(err, "random bytes")
	transfer(web, "PUT", address, session, vdi, contents)
	snapshot, err := client.VDI.Snapshot(session, vdi, map[string]string{})
	check(err, "VDI.snapshot")
	_, is_seen := seen(client, session, token, string(snapshot))
	must(is_seen, "the snapshot is an event")
	must(bytes.Equal(transfer(web, "GET", address, session, snapshot, nil), contents), "each byte came back")

	_, err = client.VDI.GetRecord(session, "OpaqueRef:nothing")
	must(err != nil, "an object that is not there")
	check(client.VDI.Destroy(session, snapshot), "VDI.destroy")
	check(client.VDI.Destroy(session, vdi), "VDI.destroy")
	check(client.Session.Logout(session), "session.logout")
	fmt.Println("done")
}
